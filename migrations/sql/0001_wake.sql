-- Notifications are hints; the rescan is the truth. Inserts: one a statement. Updates: only those that can
-- help a waiting row, with a constant payload per kind, which PostgreSQL folds within a transaction.

CREATE FUNCTION gpustackd_instances_created() RETURNS trigger
    LANGUAGE plpgsql AS $$
DECLARE
    ids bigint[] := ARRAY(SELECT id FROM created ORDER BY id LIMIT 301);
BEGIN
    IF cardinality(ids) > 300 THEN
        PERFORM gpustackd_notify('created');  -- look yourself
    ELSIF cardinality(ids) > 0 THEN
        PERFORM gpustackd_notify('created ' || array_to_string(ids, ','));
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER model_instances_created AFTER INSERT ON model_instances
    REFERENCING NEW TABLE AS created
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_instances_created();

CREATE FUNCTION gpustackd_wake() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    PERFORM gpustackd_notify(TG_ARGV[0]);
    RETURN NULL;
END
$$;

CREATE TRIGGER workers_wake AFTER INSERT ON workers
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_wake('worker');
CREATE TRIGGER workers_wake_update
    AFTER UPDATE OF state, labels, cluster_id, name, cpu_arch, unified_memory ON workers
    FOR EACH ROW
    WHEN ((NEW.state = 'READY' AND OLD.state <> 'READY')
          OR OLD.labels IS DISTINCT FROM NEW.labels
          OR OLD.cluster_id IS DISTINCT FROM NEW.cluster_id
          OR OLD.name <> NEW.name
          OR OLD.cpu_arch IS DISTINCT FROM NEW.cpu_arch
          OR OLD.unified_memory <> NEW.unified_memory)
    EXECUTE FUNCTION gpustackd_wake('worker');
-- Columns that raise `ram_capacity` or take the mark away, themselves or through the trigger that keeps them.
CREATE TRIGGER workers_wake_capacity
    AFTER UPDATE OF ram_total, ram_reserved, vram_reserved, unified_memory, ram_capacity, ram_allocated,
                    over_committed ON workers
    FOR EACH ROW
    WHEN (NEW.ram_capacity > coalesce(OLD.ram_capacity, -1)
          OR (OLD.over_committed AND NOT NEW.over_committed))
    EXECUTE FUNCTION gpustackd_wake('capacity');

CREATE TRIGGER gpu_devices_wake AFTER INSERT ON gpu_devices
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_wake('worker');
CREATE TRIGGER gpu_devices_wake_update
    AFTER UPDATE OF vram_total, schedulable, worker_ready, worker_reserve, unified, capacity, open,
                    vram_allocated, over_committed ON gpu_devices
    FOR EACH ROW
    WHEN ((NEW.open AND NOT OLD.open)
          OR NEW.capacity > coalesce(OLD.capacity, -1)
          OR (OLD.over_committed AND NOT NEW.over_committed))
    EXECUTE FUNCTION gpustackd_wake('capacity');
CREATE TRIGGER gpu_devices_wake_described
    AFTER UPDATE OF vendor, name, uuid, arch_family, compute_capability, runtime_version, links, network
    ON gpu_devices
    FOR EACH ROW
    WHEN ((OLD.vendor, OLD.name, OLD.uuid, OLD.arch_family, OLD.compute_capability, OLD.runtime_version,
           OLD.links, OLD.network)
          IS DISTINCT FROM
          (NEW.vendor, NEW.name, NEW.uuid, NEW.arch_family, NEW.compute_capability, NEW.runtime_version,
           NEW.links, NEW.network))
    EXECUTE FUNCTION gpustackd_wake('worker');

CREATE TRIGGER model_files_wake_insert AFTER INSERT ON model_files
    FOR EACH ROW WHEN (NEW.state = 'READY') EXECUTE FUNCTION gpustackd_wake('files');
CREATE TRIGGER model_files_wake_update AFTER UPDATE ON model_files
    FOR EACH ROW
    WHEN (NEW.state = 'READY'
          AND (OLD.state, OLD.size, OLD.resolved_path) IS DISTINCT FROM (NEW.state, NEW.size, NEW.resolved_path))
    EXECUTE FUNCTION gpustackd_wake('files');
CREATE TRIGGER model_files_wake_delete AFTER DELETE ON model_files
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_wake('files');

CREATE TRIGGER inference_backends_wake AFTER INSERT OR UPDATE OR DELETE ON inference_backends
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_wake('backends');
CREATE TRIGGER instance_types_wake AFTER INSERT OR UPDATE OR DELETE ON instance_types
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_wake('backends');
CREATE TRIGGER clusters_wake AFTER INSERT OR UPDATE ON clusters
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_wake('backends');
