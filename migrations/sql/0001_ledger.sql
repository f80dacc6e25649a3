-- What instances hold, and how it is given back. Lock order everywhere: model_instances, workers,
-- gpu_devices, each by id, FOR NO KEY UPDATE, all locked before the first write.

-- Send placed instances back to PENDING, placement cleared, epoch raised. Their ledger rows go with them
-- (trigger model_instances_released), and so does all that they held.
CREATE FUNCTION gpustackd_evict(ids bigint[], why text) RETURNS void
    LANGUAGE plpgsql AS $$
DECLARE
    on_workers bigint[];
    on_gpus bigint[];
BEGIN
    PERFORM 1 FROM model_instances WHERE id = ANY (ids) ORDER BY id FOR NO KEY UPDATE;
    -- All that will be given back below, instance by instance, is locked in one go and in order.
    SELECT array_agg(DISTINCT worker_id), array_agg(DISTINCT gpu_device_id) INTO on_workers, on_gpus
      FROM instance_claims WHERE instance_id = ANY (ids);
    PERFORM 1 FROM workers
      WHERE id = ANY (on_workers)
        AND (unified_memory OR id = ANY (ARRAY(SELECT worker_id FROM instance_claims
                                                WHERE instance_id = ANY (ids) AND gpu_device_id IS NULL)))
      ORDER BY id FOR NO KEY UPDATE;
    PERFORM 1 FROM gpu_devices WHERE id = ANY (on_gpus) ORDER BY id FOR NO KEY UPDATE;
    UPDATE model_instances
       SET state = 'PENDING', state_message = why, reasons = NULL,
           worker_id = NULL, worker_name = NULL, worker_ip = NULL, worker_advertise_address = NULL,
           worker_ifname = NULL, gpu_type = NULL, gpu_indexes = NULL, gpu_addresses = NULL,
           computed_resource_claim = NULL, distributed_servers = NULL, named_ports = NULL,
           scheduled_at = NULL, placement_epoch = placement_epoch + 1, attempts = 0,
           next_attempt_at = NULL, updated_at = now()
     WHERE id = ANY (ids) AND worker_id IS NOT NULL;
END
$$;

CREATE FUNCTION gpustackd_instance_released() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM instance_claims WHERE instance_id = NEW.id;
    IF NEW.state = 'PENDING' THEN
        PERFORM gpustackd_notify('created ' || NEW.id);
    END IF;
    RETURN NULL;
END
$$;

-- However the placement went: back to PENDING, or cleared on a row in ERROR.
CREATE TRIGGER model_instances_released AFTER UPDATE OF state, worker_id ON model_instances
    FOR EACH ROW
    WHEN ((NEW.state = 'PENDING' AND OLD.state NOT IN ('PENDING', 'ANALYZING'))
          OR (OLD.worker_id IS NOT NULL AND NEW.worker_id IS NULL))
    EXECUTE FUNCTION gpustackd_instance_released();

-- Ledger rows are gone, for whatever reason: a plain DELETE of an instance or a model, a lost worker, a
-- replacement. Lower what is booked, in the same transaction.
CREATE FUNCTION gpustackd_give_back() RETURNS trigger
    LANGUAGE plpgsql AS $$
DECLARE
    void_ids bigint[];
    worker_ids bigint[];
    gpu_ids bigint[];
BEGIN
    SELECT array_agg(DISTINCT worker_id), array_agg(DISTINCT gpu_device_id) FILTER (WHERE gpu_device_id IS NOT NULL)
      INTO worker_ids, gpu_ids FROM gone;
    IF worker_ids IS NULL THEN
        RETURN NULL;
    END IF;
    -- A placement that lost a row is void as a whole.
    SELECT array_agg(id) INTO void_ids FROM model_instances
     WHERE id = ANY (ARRAY(SELECT DISTINCT instance_id FROM gone)) AND worker_id IS NOT NULL;
    IF void_ids IS NOT NULL THEN
        PERFORM gpustackd_evict(void_ids, 'what this instance held was taken away; it is placed anew');
    END IF;
    PERFORM 1 FROM workers
      WHERE id = ANY (worker_ids)
        AND (unified_memory OR id = ANY (ARRAY(SELECT worker_id FROM gone WHERE gpu_device_id IS NULL)))
      ORDER BY id FOR NO KEY UPDATE;
    PERFORM 1 FROM gpu_devices WHERE id = ANY (gpu_ids) ORDER BY id FOR NO KEY UPDATE;
    -- A new statement, so a new snapshot: what the locks waited for is seen from here on.
    UPDATE workers w
       SET ram_allocated = greatest(w.ram_allocated - g.ram - CASE WHEN w.unified_memory THEN g.vram ELSE 0 END, 0),
           version = w.version + 1, changed_in = gpustackd_xid()
      FROM (SELECT worker_id, sum(ram) AS ram, sum(vram) AS vram, bool_or(gpu_device_id IS NULL) AS has_ram
              FROM gone GROUP BY worker_id) g
     WHERE w.id = g.worker_id AND w.id = ANY (worker_ids) AND (w.unified_memory OR g.has_ram);
    UPDATE gpu_devices d
       SET vram_allocated = greatest(d.vram_allocated - g.vram, 0),
           version = d.version + 1, changed_in = gpustackd_xid()
      FROM (SELECT gpu_device_id, sum(vram) AS vram FROM gone WHERE gpu_device_id IS NOT NULL
             GROUP BY gpu_device_id) g
     WHERE d.id = g.gpu_device_id AND d.id = ANY (gpu_ids);
    PERFORM gpustackd_notify('capacity');
    RETURN NULL;
END
$$;

CREATE TRIGGER instance_claims_give_back AFTER DELETE ON instance_claims
    REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_give_back();

CREATE FUNCTION gpustackd_refuse_change() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'feature_not_supported', HINT = TG_ARGV[0];
END
$$;

CREATE TRIGGER instance_claims_never_updated BEFORE UPDATE ON instance_claims
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_refuse_change(
        'A ledger row is written once. Delete the instance, or its worker, to give back what it holds.');

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['clusters', 'workers', 'gpu_devices', 'models', 'model_instances',
                                'instance_claims', 'model_files', 'inference_backends', 'instance_types',
                                'scheduling_decisions'] LOOP
        EXECUTE format(
            'CREATE TRIGGER %I BEFORE TRUNCATE ON %I FOR EACH STATEMENT EXECUTE FUNCTION '
            'gpustackd_refuse_change(%L)', name || '_never_truncated', name,
            'TRUNCATE would skip the give-back of capacity. Use DELETE.');
    END LOOP;
END
$$;

-- Lost machines and cards.
CREATE FUNCTION gpustackd_gpus_gone() RETURNS trigger
    LANGUAGE plpgsql AS $$
DECLARE
    hit bigint[];
BEGIN
    SELECT array_agg(DISTINCT c.instance_id) INTO hit FROM instance_claims c
     WHERE c.worker_id = ANY (ARRAY(SELECT DISTINCT worker_id FROM gone))
       AND c.gpu_device_id = ANY (ARRAY(SELECT id FROM gone));
    IF hit IS NOT NULL THEN
        PERFORM gpustackd_evict(hit, 'a GPU that this instance used was removed; it is placed anew');
        DELETE FROM instance_claims WHERE instance_id = ANY (hit);
    END IF;
    IF EXISTS (SELECT FROM gone) THEN
        PERFORM gpustackd_notify('deleted');
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER gpu_devices_gone AFTER DELETE ON gpu_devices
    REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_gpus_gone();

CREATE FUNCTION gpustackd_workers_gone() RETURNS trigger
    LANGUAGE plpgsql AS $$
DECLARE
    ids bigint[] := ARRAY(SELECT id FROM gone);
    hit bigint[];
BEGIN
    IF cardinality(ids) = 0 THEN
        RETURN NULL;
    END IF;
    SELECT array_agg(DISTINCT x.id) INTO hit
      FROM (SELECT instance_id AS id FROM instance_claims WHERE worker_id = ANY (ids)
            UNION ALL
            SELECT id FROM model_instances WHERE worker_id = ANY (ids)) x;
    IF hit IS NOT NULL THEN
        PERFORM gpustackd_evict(hit, 'a worker that this instance used was removed; it is placed anew');
        DELETE FROM instance_claims WHERE instance_id = ANY (hit);
    END IF;
    PERFORM gpustackd_notify('deleted');
    RETURN NULL;
END
$$;

CREATE TRIGGER workers_gone AFTER DELETE ON workers
    REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_workers_gone();
