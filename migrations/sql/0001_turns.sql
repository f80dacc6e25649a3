-- Users' statements that lock many rows in an order of their own take turns, so that they do not deadlock with
-- each other: a DELETE (which goes from instances to workers to GPUs, or, where a worker is lost, the other
-- way) waits for its turn alone; changes of workers and GPUs share theirs. Commits take no part: they lock in
-- order and yield by their time-outs.
--
-- A turn lasts to the end of the transaction and is only a courtesy: whoever waits too long for it goes on
-- without, so that one open transaction delays others but stops nobody. A transaction that holds rows already
-- waits less than the server's deadlock time-out, so that nobody who waits for those rows finds a cycle.

CREATE FUNCTION gpustackd_turn() RETURNS trigger
    LANGUAGE plpgsql
    SET lock_timeout = '400ms' AS $$
DECLARE
    alone constant boolean := TG_ARGV[0] = 'alone';
    held constant text := current_setting('gpustackd.turn', true);
    turn constant bigint := hashtextextended('gpustackd turn ' || current_schema(), 0);
BEGIN
    IF held = 'alone' OR (held = 'shared' AND NOT alone) THEN
        RETURN NULL;
    END IF;
    PERFORM set_config('gpustackd.turn', TG_ARGV[0], true);
    PERFORM set_config('lock_timeout',  -- undone when this function ends
                       (CASE WHEN pg_current_xact_id_if_assigned() IS NULL THEN 2000 ELSE 400 END
                        * extract(epoch FROM current_setting('deadlock_timeout')::interval))::int::text, true);
    BEGIN
        IF alone THEN
            PERFORM pg_advisory_xact_lock(turn);
        ELSE
            PERFORM pg_advisory_xact_lock_shared(turn);
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        NULL;
    END;
    RETURN NULL;
END
$$;

CREATE TRIGGER models_turn BEFORE DELETE ON models
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_turn('alone');
CREATE TRIGGER model_instances_turn BEFORE DELETE ON model_instances
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_turn('alone');
CREATE TRIGGER workers_turn_delete BEFORE DELETE ON workers
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_turn('alone');
CREATE TRIGGER gpu_devices_turn_delete BEFORE DELETE ON gpu_devices
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_turn('alone');

-- Every column that others write; a booking's are not among them.
CREATE TRIGGER workers_turn BEFORE UPDATE OF name, cluster_id, state, state_message, labels, ram_total,
        ram_reserved, vram_reserved, unified_memory, cpu_arch, hostname, ip, ifname, advertise_address, port,
        service_port_range, heartbeat_at ON workers
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_turn('shared');
CREATE TRIGGER gpu_devices_turn BEFORE UPDATE OF vendor, name, uuid, arch_family, compute_capability,
        runtime_version, vram_total, vram_used, vram_used_at, links, network, schedulable ON gpu_devices
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_turn('shared');
