-- Only lawful moves, whoever writes (the same table as gpustackd.domain.lifecycle.lawful).

CREATE FUNCTION gpustackd_guard_insert() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a new instance must be PENDING and hold nothing'
        USING ERRCODE = 'check_violation',
              DETAIL = format('instance %s, state %s', NEW.name, NEW.state),
              HINT = 'Insert name and model_id only; to take over a running one use gpustackd apply.';
END
$$;

CREATE TRIGGER model_instances_guard_insert BEFORE INSERT ON model_instances
    FOR EACH ROW
    WHEN (NEW.state <> 'PENDING' OR NEW.worker_id IS NOT NULL OR NEW.computed_resource_claim IS NOT NULL
          OR NEW.gpu_indexes IS NOT NULL OR NEW.lease_owner IS NOT NULL OR NEW.placement_epoch <> 0)
    EXECUTE FUNCTION gpustackd_guard_insert();

CREATE FUNCTION gpustackd_guard_move() RETURNS trigger
    LANGUAGE plpgsql AS $$
DECLARE
    chain constant text[] := ARRAY['SCHEDULED', 'INITIALIZING', 'DOWNLOADING', 'STARTING', 'RUNNING'];
    ok boolean;
BEGIN
    ok := CASE
        WHEN NEW.state = OLD.state THEN true
        WHEN NEW.state = 'PENDING' THEN
            OLD.state = 'ANALYZING'
            OR (NEW.worker_id IS NULL AND NEW.placement_epoch > OLD.placement_epoch)
        WHEN OLD.state = 'PENDING' THEN NEW.state = 'ANALYZING'
        WHEN OLD.state = 'ANALYZING' THEN NEW.state IN ('SCHEDULED', 'ERROR')
        WHEN NEW.state = 'ERROR' THEN true
        WHEN OLD.state = 'ERROR' THEN NEW.state = 'SCHEDULED'
        WHEN NEW.state = 'UNREACHABLE' THEN true
        WHEN OLD.state = 'UNREACHABLE' THEN array_position(chain, NEW.state) > 1
        ELSE array_position(chain, NEW.state) > array_position(chain, OLD.state)
    END;
    IF ok IS NOT TRUE THEN
        RAISE EXCEPTION 'instance % cannot go from % to %', OLD.name, OLD.state, NEW.state
            USING ERRCODE = 'check_violation',
                  HINT = 'Back to PENDING only with the placement cleared and placement_epoch raised in the same UPDATE.';
    END IF;
    IF NEW.model_id <> OLD.model_id THEN
        RAISE EXCEPTION 'instance % belongs to model % and cannot become one of model %', OLD.name, OLD.model_id,
            NEW.model_id
            USING ERRCODE = 'check_violation', HINT = 'Delete it and insert one for the other model.';
    END IF;
    IF NEW.placement_epoch < OLD.placement_epoch THEN
        RAISE EXCEPTION 'placement_epoch of instance % is % and never falls (to %)', OLD.name,
            OLD.placement_epoch, NEW.placement_epoch
            USING ERRCODE = 'check_violation', HINT = 'An old copy of the row was written back; read it again.';
    END IF;
    IF OLD.worker_id IS NULL AND NEW.worker_id IS NOT NULL AND OLD.state <> 'ANALYZING' THEN
        RAISE EXCEPTION 'instance % in % cannot be given worker %', OLD.name, OLD.state, NEW.worker_id
            USING ERRCODE = 'check_violation',
                  HINT = 'The scheduler places it; to take over a running one use gpustackd apply.';
    END IF;
    IF OLD.worker_id <> NEW.worker_id THEN
        RAISE EXCEPTION 'instance % cannot move from worker % to %', OLD.name, OLD.worker_id, NEW.worker_id
            USING ERRCODE = 'check_violation',
                  HINT = 'Send it back to PENDING; the scheduler places it anew.';
    END IF;
    IF NEW.state <> OLD.state THEN
        NEW.state_since := clock_timestamp();
        IF NEW.state = 'ERROR' AND NEW.worker_id IS NOT NULL THEN
            NEW.failures := OLD.failures + 1;  -- in this place
        ELSIF NEW.state = 'PENDING' THEN
            NEW.failures := 0;
        ELSIF NEW.state = 'SCHEDULED' THEN
            NEW.scheduled_at := clock_timestamp();  -- a restart in place: its worker has the window anew
        END IF;
    END IF;
    RETURN NEW;
END
$$;

-- The two moves of the scheduler's hot path are decided in the WHEN clause alone.
CREATE TRIGGER model_instances_guard_move
    BEFORE UPDATE OF state, worker_id, model_id, placement_epoch ON model_instances
    FOR EACH ROW
    WHEN ((OLD.state <> NEW.state
           AND NOT (OLD.state = 'PENDING' AND NEW.state = 'ANALYZING')
           AND NOT (OLD.state = 'ANALYZING' AND NEW.state IN ('SCHEDULED', 'PENDING')))
          OR OLD.worker_id <> NEW.worker_id
          OR (OLD.worker_id IS NULL AND NEW.worker_id IS NOT NULL AND OLD.state <> 'ANALYZING')
          OR OLD.model_id <> NEW.model_id
          OR NEW.placement_epoch < OLD.placement_epoch)
    EXECUTE FUNCTION gpustackd_guard_move();

-- The version of a model rises with every edit of what a decision looks at. What the daemon fills in by
-- itself (gpustackd.autofill) is no edit: it must not void the decision that it belongs to. How many replicas
-- there are matters where they share hand-picked GPUs out, and nowhere else.
CREATE FUNCTION gpustackd_model_edited() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    NEW.updated_at := now();
    IF current_setting('gpustackd.autofill', true) IS DISTINCT FROM 'on' THEN
        NEW.version := OLD.version + 1;
        PERFORM gpustackd_notify('model ' || NEW.id);
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER models_edited BEFORE UPDATE ON models
    FOR EACH ROW
    WHEN ((OLD.owner, OLD.cluster_id, OLD.source, OLD.huggingface_repo_id, OLD.huggingface_filename,
           OLD.model_scope_model_id, OLD.model_scope_file_path, OLD.local_path, OLD.revision, OLD.categories,
           OLD.backend, OLD.backend_version, OLD.backend_parameters, OLD.image_name, OLD.run_command, OLD.env,
           OLD.placement_strategy, OLD.cpu_offloading, OLD.distributed_inference_across_workers,
           OLD.worker_selector, OLD.gpu_selector, OLD.gpu_type_selector, OLD.speculative_config,
           OLD.extended_kv_cache, OLD.lora_list, OLD.roles, OLD.disaggregation, OLD.gather, OLD.priority,
           OLD.preemption, OLD.name, CASE WHEN OLD.gpu_selector IS NOT NULL THEN OLD.replicas END)
          IS DISTINCT FROM
          (NEW.owner, NEW.cluster_id, NEW.source, NEW.huggingface_repo_id, NEW.huggingface_filename,
           NEW.model_scope_model_id, NEW.model_scope_file_path, NEW.local_path, NEW.revision, NEW.categories,
           NEW.backend, NEW.backend_version, NEW.backend_parameters, NEW.image_name, NEW.run_command, NEW.env,
           NEW.placement_strategy, NEW.cpu_offloading, NEW.distributed_inference_across_workers,
           NEW.worker_selector, NEW.gpu_selector, NEW.gpu_type_selector, NEW.speculative_config,
           NEW.extended_kv_cache, NEW.lora_list, NEW.roles, NEW.disaggregation, NEW.gather, NEW.priority,
           NEW.preemption, NEW.name, CASE WHEN NEW.gpu_selector IS NOT NULL THEN NEW.replicas END))
    EXECUTE FUNCTION gpustackd_model_edited();
