-- Capacity lives on the row that it guards: workers and gpu_devices keep what they offer beside what is
-- booked on them, and a CHECK compares the two whatever the code does.

CREATE FUNCTION gpustackd_notify(payload text) RETURNS void
    LANGUAGE sql AS $$
SELECT pg_notify(left('gpustackd_' || current_schema(), 63), payload)
$$;

-- The transaction that last changed a row: a replica reads rows changed since the oldest transaction that
-- was still open at its previous look.
CREATE FUNCTION gpustackd_xid() RETURNS bigint
    LANGUAGE sql AS $$
SELECT pg_current_xact_id()::text::bigint
$$;

CREATE FUNCTION gpustackd_worker_capacity() RETURNS trigger
    LANGUAGE plpgsql AS $$
DECLARE
    shrank boolean := false;
BEGIN
    NEW.ram_capacity := greatest(
        NEW.ram_total - NEW.ram_reserved - CASE WHEN NEW.unified_memory THEN NEW.vram_reserved ELSE 0 END, 0);
    IF NEW.ram_total IS NULL THEN
        NEW.ram_capacity := NULL;  -- greatest() passes over a NULL
    END IF;
    IF TG_OP = 'INSERT' THEN
        NEW.ram_allocated := 0;
        NEW.version := 0;
    ELSE
        IF NEW.unified_memory <> OLD.unified_memory THEN
            -- One pool from now on (or no more): the GPUs first, so that no booking is in flight.
            PERFORM 1 FROM gpu_devices WHERE worker_id = NEW.id ORDER BY id FOR NO KEY UPDATE;
            SELECT coalesce(sum(ram), 0) + CASE WHEN NEW.unified_memory THEN coalesce(sum(vram), 0) ELSE 0 END
              INTO NEW.ram_allocated FROM instance_claims WHERE worker_id = NEW.id;
            shrank := true;
        END IF;
        shrank := shrank OR NEW.ram_capacity IS NULL OR NEW.ram_capacity < OLD.ram_capacity;
        IF NEW.version = OLD.version THEN
            NEW.version := OLD.version + 1;  -- bookings and give-backs state the version themselves
        END IF;
    END IF;
    IF NEW.ram_allocated = 0 OR NEW.ram_allocated <= NEW.ram_capacity THEN
        NEW.over_committed := false;
    ELSIF shrank THEN
        NEW.over_committed := true;  -- shrinking never blocks; the mark keeps new bookings away
    END IF;
    NEW.changed_in := gpustackd_xid();
    NEW.updated_at := now();
    RETURN NEW;
END
$$;

CREATE TRIGGER workers_capacity_insert BEFORE INSERT ON workers
    FOR EACH ROW EXECUTE FUNCTION gpustackd_worker_capacity();

-- Never on a heartbeat, nor on a plain booking: only on what a decision looks at, and on a marked row when
-- what is booked there changes. (Columns are listed because a statement reads the conditions of all triggers
-- that its own columns concern, and for a heartbeat that was most of the work.)
CREATE TRIGGER workers_capacity_update
    BEFORE UPDATE OF name, cluster_id, state, labels, ram_total, ram_reserved, vram_reserved, unified_memory,
                     cpu_arch, ip, ifname, advertise_address, port, service_port_range, ram_capacity
    ON workers FOR EACH ROW
    WHEN ((OLD.name, OLD.cluster_id, OLD.state, OLD.labels, OLD.ram_total, OLD.ram_reserved,
           OLD.vram_reserved, OLD.unified_memory, OLD.cpu_arch, OLD.ip, OLD.ifname, OLD.advertise_address,
           OLD.port, OLD.service_port_range, OLD.ram_capacity)
          IS DISTINCT FROM
          (NEW.name, NEW.cluster_id, NEW.state, NEW.labels, NEW.ram_total, NEW.ram_reserved,
           NEW.vram_reserved, NEW.unified_memory, NEW.cpu_arch, NEW.ip, NEW.ifname, NEW.advertise_address,
           NEW.port, NEW.service_port_range, NEW.ram_capacity))
    EXECUTE FUNCTION gpustackd_worker_capacity();
CREATE TRIGGER workers_capacity_booked BEFORE UPDATE OF ram_allocated ON workers
    FOR EACH ROW
    WHEN (OLD.over_committed AND OLD.ram_allocated <> NEW.ram_allocated)
    EXECUTE FUNCTION gpustackd_worker_capacity();

CREATE FUNCTION gpustackd_worker_to_gpus() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM gpu_devices WHERE worker_id = NEW.id ORDER BY id FOR NO KEY UPDATE;
    UPDATE gpu_devices
       SET worker_ready = NEW.state = 'READY', worker_reserve = NEW.vram_reserved, unified = NEW.unified_memory
     WHERE worker_id = NEW.id;
    RETURN NULL;
END
$$;

CREATE TRIGGER workers_to_gpus AFTER UPDATE OF state, vram_reserved, unified_memory ON workers
    FOR EACH ROW
    WHEN ((OLD.state = 'READY') <> (NEW.state = 'READY')
          OR OLD.vram_reserved <> NEW.vram_reserved
          OR OLD.unified_memory <> NEW.unified_memory)
    EXECUTE FUNCTION gpustackd_worker_to_gpus();

CREATE FUNCTION gpustackd_gpu_capacity() RETURNS trigger
    LANGUAGE plpgsql AS $$
DECLARE
    host record;
    shrank boolean := false;
BEGIN
    IF TG_OP = 'INSERT' THEN
        -- FOR SHARE: a change of the worker's state must not slip between this look and our commit.
        SELECT state = 'READY' AS ready, vram_reserved, unified_memory
          INTO host FROM workers WHERE id = NEW.worker_id FOR SHARE;
        NEW.worker_ready := coalesce(host.ready, false);
        NEW.worker_reserve := coalesce(host.vram_reserved, 0);
        NEW.unified := coalesce(host.unified_memory, false);
        NEW.vram_allocated := 0;
        NEW.version := 0;
        IF (SELECT count(*) FROM gpu_devices WHERE worker_id = NEW.worker_id) >= 256 THEN
            -- Every daemon keeps a column for each card of the largest worker.
            RAISE EXCEPTION 'worker % has 256 GPUs, which is the most a worker can have', NEW.worker_id
                USING ERRCODE = 'program_limit_exceeded', HINT = 'Split it into several workers.';
        END IF;
    ELSE
        -- A decision on its way names the card by its id and writes its index: another index is another card.
        IF (NEW.worker_id, NEW.type, NEW.index) <> (OLD.worker_id, OLD.type, OLD.index) THEN
            RAISE EXCEPTION 'GPU % is %:% of worker % and cannot become %:% of worker %', OLD.id, OLD.type,
                OLD.index, OLD.worker_id, NEW.type, NEW.index, NEW.worker_id
                USING ERRCODE = 'check_violation',
                      HINT = 'Delete the row and insert another; instances on it are placed anew.';
        END IF;
        IF NEW.version = OLD.version THEN
            NEW.version := OLD.version + 1;
        END IF;
    END IF;
    NEW.capacity := CASE WHEN NEW.vram_total IS NULL THEN NULL
                         ELSE greatest(NEW.vram_total - NEW.worker_reserve, 0) END;
    NEW.open := NEW.worker_ready AND NEW.schedulable;
    IF TG_OP = 'UPDATE' THEN
        shrank := NEW.capacity IS NULL OR NEW.capacity < OLD.capacity;
    END IF;
    IF NEW.vram_allocated = 0 OR NEW.vram_allocated <= NEW.capacity THEN
        NEW.over_committed := false;
    ELSIF shrank THEN
        NEW.over_committed := true;
    END IF;
    NEW.changed_in := gpustackd_xid();
    NEW.updated_at := now();
    RETURN NEW;
END
$$;

CREATE TRIGGER gpu_devices_capacity_insert BEFORE INSERT ON gpu_devices
    FOR EACH ROW EXECUTE FUNCTION gpustackd_gpu_capacity();

-- Never on a usage sample, nor on a plain booking.
CREATE TRIGGER gpu_devices_capacity_update
    BEFORE UPDATE OF worker_id, index, type, vendor, name, uuid, arch_family, compute_capability,
                     runtime_version, vram_total, links, network, schedulable, worker_ready, worker_reserve,
                     unified, capacity, open
    ON gpu_devices FOR EACH ROW
    WHEN ((OLD.worker_id, OLD.index, OLD.type, OLD.vendor, OLD.name, OLD.uuid, OLD.arch_family,
           OLD.compute_capability, OLD.runtime_version, OLD.vram_total, OLD.links, OLD.network,
           OLD.schedulable, OLD.worker_ready, OLD.worker_reserve, OLD.unified, OLD.capacity, OLD.open)
          IS DISTINCT FROM
          (NEW.worker_id, NEW.index, NEW.type, NEW.vendor, NEW.name, NEW.uuid, NEW.arch_family,
           NEW.compute_capability, NEW.runtime_version, NEW.vram_total, NEW.links, NEW.network,
           NEW.schedulable, NEW.worker_ready, NEW.worker_reserve, NEW.unified, NEW.capacity, NEW.open))
    EXECUTE FUNCTION gpustackd_gpu_capacity();
CREATE TRIGGER gpu_devices_capacity_booked BEFORE UPDATE OF vram_allocated ON gpu_devices
    FOR EACH ROW
    WHEN (OLD.over_committed AND OLD.vram_allocated <> NEW.vram_allocated)
    EXECUTE FUNCTION gpustackd_gpu_capacity();
