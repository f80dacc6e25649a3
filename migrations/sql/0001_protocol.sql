-- Claim, commit, refuse: every write of a replica to an instance states the owner and the epoch that it
-- expects, and a lease that still runs by the database's clock.

CREATE FUNCTION gpustackd_claim(p_owner uuid, p_ids bigint[], p_epochs bigint[], p_lease double precision)
    RETURNS TABLE (id bigint, name text, model_id bigint, epoch bigint, attempts bigint, priority bigint,
                   waited double precision)
    LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    mine bigint[];
BEGIN
    mine := ARRAY(
        SELECT i.id FROM model_instances i
         WHERE i.id = ANY (p_ids) AND i.state = 'PENDING'
           AND i.placement_epoch = p_epochs[array_position(p_ids, i.id)]
         ORDER BY i.id FOR NO KEY UPDATE SKIP LOCKED);
    RETURN QUERY
    UPDATE model_instances i
       SET state = 'ANALYZING', lease_owner = p_owner,
           lease_until = clock_timestamp() + make_interval(secs => p_lease),
           placement_epoch = i.placement_epoch + 1, attempts = i.attempts + 1, updated_at = now()
      FROM models m
     WHERE i.id = ANY (mine) AND m.id = i.model_id
    RETURNING i.id, i.name, i.model_id, i.placement_epoch, i.attempts, coalesce(i.priority, m.priority),
              extract(epoch FROM clock_timestamp() - i.created_at)::double precision;
END
$$;

CREATE FUNCTION gpustackd_renew(p_owner uuid, p_ids bigint[], p_lease double precision)
    RETURNS SETOF bigint
    LANGUAGE sql AS $$
    UPDATE model_instances
       SET lease_until = clock_timestamp() + make_interval(secs => p_lease)
     WHERE id = ANY (ARRAY(
               SELECT id FROM model_instances
                WHERE id = ANY (p_ids) AND state = 'ANALYZING' AND lease_owner = p_owner
                  AND lease_until > clock_timestamp()
                ORDER BY id FOR NO KEY UPDATE SKIP LOCKED))
    RETURNING id
$$;

-- A batch of placements, an outcome each; only the exceptions are returned. One clash rejects one placement.
-- Placement n books the worker rows w_*[w_from[n]..w_to[n]] and the ledger rows l_*[l_from[n]..l_to[n]].
CREATE FUNCTION gpustackd_commit(
        p_owner uuid, p_replica text,
        p_instance bigint[], p_epoch bigint[], p_model bigint[], p_model_version bigint[],
        p_unchanged boolean[], p_over boolean[],
        p_worker bigint[], p_worker_name text[], p_worker_ip text[], p_worker_address text[],
        p_worker_ifname text[], p_gpu_type text[], p_gpu_indexes text[], p_gpu_addresses text[],
        p_claim text[], p_distributed text[], p_message text[],
        p_attempt bigint[], p_pool text[], p_candidates text[], p_reasons text[], p_duration double precision[],
        w_from int[], w_to int[], w_id bigint[], w_ram bigint[], w_unified boolean[], w_version bigint[],
        l_from int[], l_to int[], l_instance bigint[], l_worker bigint[], l_gpu bigint[], l_part text[],
        l_vram bigint[], l_ram bigint[], l_version bigint[], l_unified boolean[])
    RETURNS TABLE (instance_id bigint, code text, gpu_ids bigint[], worker_ids bigint[])
    LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    xid constant bigint := gpustackd_xid();
    mine bigint[];
    epochs bigint[];
    models_seen bigint[];
    versions_seen bigint[];
    placed bigint[] := '{}';
    at int;
    k int;
    w_upto int;
    l_upto int;
    uniform boolean;
    wanted bigint[];
    booked bigint[];
    clash_gpus bigint[];
    clash_workers bigint[];
BEGIN
    -- Locks first, in the order of every writer. A row that someone else holds is being deleted: lost.
    SELECT array_agg(i.id), array_agg(i.placement_epoch) INTO mine, epochs
      FROM (SELECT id, placement_epoch FROM model_instances
             WHERE id = ANY (p_instance) AND state = 'ANALYZING' AND lease_owner = p_owner
               AND lease_until > clock_timestamp()
             ORDER BY id FOR NO KEY UPDATE SKIP LOCKED) i;
    IF cardinality(w_id) > 0 THEN
        PERFORM 1 FROM workers WHERE id = ANY (w_id) ORDER BY id FOR NO KEY UPDATE;
    END IF;
    PERFORM 1 FROM gpu_devices WHERE id = ANY (l_gpu) ORDER BY id FOR NO KEY UPDATE;
    SELECT array_agg(id), array_agg(version) INTO models_seen, versions_seen
      FROM models WHERE id = ANY (p_model);

    FOR n IN 1 .. cardinality(p_instance) LOOP
        at := array_position(mine, p_instance[n]);
        IF at IS NULL OR epochs[at] <> p_epoch[n] THEN
            instance_id := p_instance[n]; code := 'lost'; gpu_ids := NULL; worker_ids := NULL;
            RETURN NEXT;
            CONTINUE;
        END IF;
        at := array_position(models_seen, p_model[n]);
        IF at IS NULL OR versions_seen[at] <> p_model_version[n] THEN
            instance_id := p_instance[n]; code := 'model_changed'; gpu_ids := NULL; worker_ids := NULL;
            RETURN NEXT;
            CONTINUE;
        END IF;
        clash_gpus := '{}';
        clash_workers := '{}';
        booked := '{}';
        w_upto := w_from[n] - 1;  -- the last row booked, here and on the ledger's side
        l_upto := l_from[n] - 1;

        FOR k IN w_from[n] .. w_to[n] LOOP
            UPDATE workers
               SET ram_allocated = ram_allocated + w_ram[k], version = version + 1, changed_in = xid,
                   over_committed = over_committed
                       OR (p_over[n] AND w_ram[k] > 0
                           AND ram_allocated + w_ram[k] > coalesce(ram_capacity, 0))
             WHERE id = w_id[k] AND state = 'READY' AND unified_memory = w_unified[k]
               AND (w_ram[k] = 0 OR p_over[n]
                    OR (NOT over_committed AND ram_capacity - ram_allocated >= w_ram[k]))
               AND (NOT p_unchanged[n] OR version = w_version[k]);
            IF NOT FOUND THEN
                clash_workers := clash_workers || w_id[k];
                EXIT;
            END IF;
            w_upto := k;
        END LOOP;

        IF cardinality(clash_workers) = 0 THEN
            -- One statement where all GPUs of the placement take the same; else one for each.
            wanted := l_gpu[l_from[n] : l_to[n]];
            uniform := NOT (p_unchanged[n] OR p_over[n]);
            FOR k IN l_from[n] + 1 .. l_to[n] LOOP
                EXIT WHEN NOT uniform;
                uniform := l_vram[k] = l_vram[l_from[n]] AND l_unified[k] = l_unified[l_from[n]]
                           AND l_gpu[k] IS NOT NULL AND l_gpu[l_from[n]] IS NOT NULL;
            END LOOP;
            IF uniform AND l_gpu[l_from[n]] IS NOT NULL THEN
                WITH done AS (
                    UPDATE gpu_devices
                       SET vram_allocated = vram_allocated + l_vram[l_from[n]], version = version + 1,
                           changed_in = xid
                     WHERE id = ANY (wanted) AND open AND NOT over_committed
                       AND unified = l_unified[l_from[n]] AND capacity - vram_allocated >= l_vram[l_from[n]]
                    RETURNING id)
                SELECT coalesce(array_agg(id), '{}') INTO booked FROM done;
                IF cardinality(booked) < cardinality(wanted) THEN
                    clash_gpus := ARRAY(SELECT unnest(wanted) EXCEPT SELECT unnest(booked));
                    IF cardinality(clash_gpus) = 0 THEN
                        clash_gpus := wanted;  -- one GPU named twice: its second half is not booked
                    END IF;
                END IF;
            ELSE
                FOR k IN l_from[n] .. l_to[n] LOOP
                    CONTINUE WHEN l_gpu[k] IS NULL;
                    UPDATE gpu_devices
                       SET vram_allocated = vram_allocated + l_vram[k], version = version + 1, changed_in = xid,
                           over_committed = over_committed
                               OR (p_over[n] AND vram_allocated + l_vram[k] > coalesce(capacity, 0))
                     WHERE id = l_gpu[k] AND open AND unified = l_unified[k]
                       AND (p_over[n] OR (NOT over_committed AND capacity - vram_allocated >= l_vram[k]))
                       AND (NOT p_unchanged[n] OR version = l_version[k]);
                    IF NOT FOUND THEN
                        clash_gpus := clash_gpus || l_gpu[k];
                        EXIT;
                    END IF;
                    l_upto := k;
                END LOOP;
            END IF;
        END IF;

        IF cardinality(clash_workers) > 0 OR cardinality(clash_gpus) > 0 THEN
            -- Nobody saw the half: all these rows are locked by us. Put them back exactly.
            UPDATE gpu_devices SET vram_allocated = vram_allocated - l_vram[l_from[n]], version = version - 1
             WHERE id = ANY (booked);
            FOR k IN l_from[n] .. l_upto LOOP
                CONTINUE WHEN l_gpu[k] IS NULL;
                UPDATE gpu_devices SET vram_allocated = vram_allocated - l_vram[k], version = version - 1
                 WHERE id = l_gpu[k];
            END LOOP;
            FOR k IN w_from[n] .. w_upto LOOP
                UPDATE workers SET ram_allocated = ram_allocated - w_ram[k], version = version - 1
                 WHERE id = w_id[k];
            END LOOP;
            instance_id := p_instance[n]; code := 'conflict';
            gpu_ids := clash_gpus; worker_ids := clash_workers;
            RETURN NEXT;
            CONTINUE;
        END IF;

        UPDATE model_instances
           SET state = 'SCHEDULED', state_message = p_message[n], reasons = NULL,
               lease_owner = NULL, lease_until = NULL, next_attempt_at = NULL,
               worker_id = p_worker[n], worker_name = p_worker_name[n], worker_ip = p_worker_ip[n],
               worker_advertise_address = p_worker_address[n], worker_ifname = p_worker_ifname[n],
               gpu_type = p_gpu_type[n], gpu_indexes = p_gpu_indexes[n]::jsonb,
               gpu_addresses = p_gpu_addresses[n]::jsonb, computed_resource_claim = p_claim[n]::jsonb,
               distributed_servers = p_distributed[n]::jsonb, scheduled_at = clock_timestamp(),
               updated_at = now()
         WHERE id = p_instance[n];
        placed := placed || p_instance[n];
    END LOOP;

    IF cardinality(placed) > 0 THEN
        INSERT INTO instance_claims (instance_id, worker_id, gpu_device_id, part, vram, ram)
        SELECT x.i, x.w, x.g, x.p, x.v, x.r
          FROM unnest(l_instance, l_worker, l_gpu, l_part, l_vram, l_ram) AS x (i, w, g, p, v, r)
         WHERE x.i = ANY (placed);
        INSERT INTO scheduling_decisions
               (instance_id, placement_epoch, attempt, replica, outcome, pool, candidates, reasons, duration_ms)
        SELECT x.i, x.e, x.a, p_replica, 'PLACED', x.pool::jsonb, x.c::jsonb, x.r::jsonb, x.d
          FROM unnest(p_instance, p_epoch, p_attempt, p_pool, p_candidates, p_reasons, p_duration)
               AS x (i, e, a, pool, c, r, d)
         WHERE x.i = ANY (placed);
    END IF;
END
$$;

-- Back to PENDING (or to ERROR) with the reasons. Returns the ids written.
CREATE FUNCTION gpustackd_refuse(
        p_owner uuid, p_replica text, p_ids bigint[], p_epochs bigint[], p_states text[], p_messages text[],
        p_reasons text[], p_retry double precision[], p_outcomes text[], p_attempts bigint[], p_pools text[],
        p_durations double precision[])
    RETURNS SETOF bigint
    LANGUAGE plpgsql AS $$
DECLARE
    mine bigint[];
BEGIN
    mine := ARRAY(
        SELECT id FROM model_instances
         WHERE id = ANY (p_ids) AND state = 'ANALYZING' AND lease_owner = p_owner
           AND lease_until > clock_timestamp() AND placement_epoch = p_epochs[array_position(p_ids, id)]
         ORDER BY id FOR NO KEY UPDATE SKIP LOCKED);
    FOR n IN 1 .. cardinality(p_ids) LOOP
        CONTINUE WHEN NOT p_ids[n] = ANY (mine);
        UPDATE model_instances
           SET state = p_states[n], state_message = p_messages[n], reasons = p_reasons[n]::jsonb,
               next_attempt_at = clock_timestamp() + make_interval(secs => p_retry[n]),
               lease_owner = NULL, lease_until = NULL, updated_at = now()
         WHERE id = p_ids[n];
        RETURN NEXT p_ids[n];
    END LOOP;
    INSERT INTO scheduling_decisions
           (instance_id, placement_epoch, attempt, replica, outcome, pool, reasons, duration_ms)
    SELECT x.i, x.e, x.a, p_replica, x.o, x.pool::jsonb, x.r::jsonb, x.d
      FROM unnest(p_ids, p_epochs, p_attempts, p_outcomes, p_pools, p_reasons, p_durations)
           AS x (i, e, a, o, pool, r, d)
     WHERE x.i = ANY (mine);
END
$$;

-- Claims given back at shutdown: others go on at once.
CREATE FUNCTION gpustackd_hand_back(p_owner uuid) RETURNS SETOF bigint
    LANGUAGE plpgsql AS $$
DECLARE
    ids bigint[];
BEGIN
    ids := ARRAY(SELECT id FROM model_instances WHERE state = 'ANALYZING' AND lease_owner = p_owner
                  ORDER BY id FOR NO KEY UPDATE SKIP LOCKED);
    UPDATE model_instances
       SET state = 'PENDING', lease_owner = NULL, lease_until = NULL, updated_at = now()
     WHERE id = ANY (ids);
    IF cardinality(ids) BETWEEN 1 AND 300 THEN
        PERFORM gpustackd_notify('created ' || array_to_string(ids, ','));
    ELSIF cardinality(ids) > 300 THEN
        PERFORM gpustackd_notify('created');
    END IF;
    RETURN QUERY SELECT unnest(ids);
END
$$;

-- Leases of replicas that died or slept: anybody may sweep.
CREATE FUNCTION gpustackd_expire_leases() RETURNS SETOF bigint
    LANGUAGE sql AS $$
    UPDATE model_instances
       SET state = 'PENDING', lease_owner = NULL, lease_until = NULL, updated_at = now()
     WHERE id = ANY (ARRAY(SELECT id FROM model_instances
                            WHERE state = 'ANALYZING' AND lease_until <= clock_timestamp()
                            ORDER BY id FOR NO KEY UPDATE SKIP LOCKED))
    RETURNING id
$$;

-- What the daemon fills in on a model by itself. Only for the version it looked at; wakes nobody.
CREATE FUNCTION gpustackd_autofill(p_model bigint, p_version bigint, p_patch jsonb) RETURNS boolean
    LANGUAGE plpgsql AS $$
DECLARE
    written boolean;
BEGIN
    PERFORM set_config('gpustackd.autofill', 'on', true);
    UPDATE models
       SET categories = coalesce(p_patch -> 'categories', categories),
           meta = coalesce(p_patch -> 'meta', meta),
           gpu_selector = coalesce(p_patch -> 'gpu_selector', gpu_selector),
           distributed_inference_across_workers = coalesce(
               (p_patch ->> 'distributed_inference_across_workers')::boolean,
               distributed_inference_across_workers),
           distributable = coalesce((p_patch ->> 'distributable')::boolean, distributable)
     WHERE id = p_model AND version = p_version;
    written := FOUND;
    PERFORM set_config('gpustackd.autofill', 'off', true);
    RETURN written;
END
$$;

-- Functions run with the schema they were made in, whoever calls; nothing of the session leaks in.
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT p.oid FROM pg_proc p
              WHERE p.pronamespace = current_schema()::regnamespace AND p.proname LIKE 'gpustackd\_%' LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path TO %I, pg_temp', f, current_schema());
    END LOOP;
END
$$;
ALTER FUNCTION gpustackd_commit SET plan_cache_mode TO force_generic_plan;
