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

-- Returns what is still ours. A row that somebody has locked (our own commit, often) is not waited for: its
-- lease runs on as it is, and the next renewal comes before its end.
CREATE FUNCTION gpustackd_renew(p_owner uuid, p_ids bigint[], p_lease double precision)
    RETURNS SETOF bigint
    LANGUAGE sql AS $$
    WITH renewed AS (
        UPDATE model_instances
           SET lease_until = clock_timestamp() + make_interval(secs => p_lease)
         WHERE id = ANY (ARRAY(
                   SELECT id FROM model_instances
                    WHERE id = ANY (p_ids) AND state = 'ANALYZING' AND lease_owner = p_owner
                      AND lease_until > clock_timestamp()
                    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED))
        RETURNING id)
    SELECT id FROM renewed
    UNION
    SELECT id FROM model_instances
     WHERE id = ANY (p_ids) AND state = 'ANALYZING' AND lease_owner = p_owner AND lease_until > clock_timestamp()
$$;

-- Lock what an owner holds of these instances: their ids in order, and their epochs. A row that somebody else
-- has locked is left out: a user's delete has it. Only for a moment longer than a renewal lasts is it waited
-- for, since that is how our own renewal looks from here.
CREATE FUNCTION gpustackd_take(p_owner uuid, p_ids bigint[], OUT ids bigint[], OUT epochs bigint[])
    LANGUAGE plpgsql AS $$
DECLARE
    patience constant timestamptz := clock_timestamp() + 0.02 * current_setting('deadlock_timeout')::interval;
BEGIN
    LOOP
        SELECT array_agg(i.id), array_agg(i.placement_epoch) INTO ids, epochs
          FROM (SELECT id, placement_epoch FROM model_instances
                 WHERE id = ANY (p_ids) AND state = 'ANALYZING' AND lease_owner = p_owner
                   AND lease_until > clock_timestamp()
                 ORDER BY id FOR NO KEY UPDATE SKIP LOCKED) i;
        EXIT WHEN cardinality(ids) = cardinality(p_ids) OR clock_timestamp() > patience;
        EXIT WHEN coalesce(cardinality(ids), 0) >= (
            SELECT count(*) FROM model_instances
             WHERE id = ANY (p_ids) AND state = 'ANALYZING' AND lease_owner = p_owner
               AND lease_until > clock_timestamp());
        PERFORM pg_sleep(0.001);
    END LOOP;
END
$$;

-- A batch of placements, an outcome each; only the exceptions are returned. One clash rejects one placement.
-- Placement n books the worker rows w_*[w_from[n]..w_to[n]] and the ledger rows l_*[l_from[n]..l_to[n]].
--
-- All rows are locked first, so that what is read with the locks stays true: the placements are then tried
-- one after another on those figures, each on what the ones before it left (two may want one row), and what
-- was accepted is written by one statement a table. (Every statement that writes a row with triggers pays
-- for reading their conditions anew; one a placement cost four times as much in all.)
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
    -- Instances that are ours, and the models as they are now.
    mine bigint[];
    epochs bigint[];
    models_seen bigint[];
    versions_seen bigint[];
    -- The rows to book on, as locked: takes = may be booked on at all, sound = and within its capacity,
    -- room = capacity less what is booked, seen = version; more, times and mark are what accepted
    -- placements add.
    host bigint[];
    host_takes boolean[];
    host_sound boolean[];
    host_unified boolean[];
    host_room bigint[];
    host_seen bigint[];
    host_more bigint[];
    host_times int[];
    host_mark boolean[];
    card bigint[];
    card_takes boolean[];
    card_sound boolean[];
    card_unified boolean[];
    card_room bigint[];
    card_seen bigint[];
    card_more bigint[];
    card_times int[];
    card_mark boolean[];
    placed bigint[] := '{}';
    clash_gpus bigint[];
    clash_workers bigint[];
    tried_w int;
    tried_l int;
    at int;
BEGIN
    -- Locks, in the order of every writer. An instance that someone else holds is being deleted: lost.
    SELECT t.ids, t.epochs INTO mine, epochs FROM gpustackd_take(p_owner, p_instance) t;
    IF cardinality(w_id) > 0 THEN
        SELECT array_agg(w.id), array_agg(w.state = 'READY'),
               array_agg(NOT w.over_committed AND w.ram_capacity IS NOT NULL), array_agg(w.unified_memory),
               array_agg(coalesce(w.ram_capacity, 0) - w.ram_allocated), array_agg(w.version),
               array_agg(0::bigint), array_agg(0), array_agg(false)
          INTO host, host_takes, host_sound, host_unified, host_room, host_seen, host_more, host_times, host_mark
          FROM (SELECT id, state, over_committed, ram_capacity, unified_memory, ram_allocated, version
                  FROM workers WHERE id = ANY (w_id) ORDER BY id FOR NO KEY UPDATE) w;
    END IF;
    SELECT array_agg(g.id), array_agg(g.open), array_agg(NOT g.over_committed AND g.capacity IS NOT NULL),
           array_agg(g.unified), array_agg(coalesce(g.capacity, 0) - g.vram_allocated), array_agg(g.version),
           array_agg(0::bigint), array_agg(0), array_agg(false)
      INTO card, card_takes, card_sound, card_unified, card_room, card_seen, card_more, card_times, card_mark
      FROM (SELECT id, open, over_committed, capacity, unified, vram_allocated, version
              FROM gpu_devices WHERE id = ANY (l_gpu) ORDER BY id FOR NO KEY UPDATE) g;
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
        tried_w := w_from[n] - 1;  -- the last rows booked, here and on the ledger's side
        tried_l := l_from[n] - 1;

        FOR k IN w_from[n] .. w_to[n] LOOP
            at := array_position(host, w_id[k]);
            IF host_takes[at] AND host_unified[at] = w_unified[k]
               AND (w_ram[k] = 0 OR p_over[n] OR (host_sound[at] AND host_room[at] >= w_ram[k]))
               AND (NOT p_unchanged[n] OR host_seen[at] = w_version[k]) THEN
                host_room[at] := host_room[at] - w_ram[k];
                host_more[at] := host_more[at] + w_ram[k];
                host_seen[at] := host_seen[at] + 1;
                host_times[at] := host_times[at] + 1;
                tried_w := k;
            ELSE  -- also where the row is gone: `at` is NULL, and so is all that is asked of it
                clash_workers := clash_workers || w_id[k];
                EXIT;
            END IF;
        END LOOP;
        IF cardinality(clash_workers) = 0 THEN
            FOR k IN l_from[n] .. l_to[n] LOOP
                IF l_gpu[k] IS NULL THEN
                    tried_l := k;
                    CONTINUE;
                END IF;
                at := array_position(card, l_gpu[k]);
                IF card_takes[at] AND card_unified[at] = l_unified[k]
                   AND (p_over[n] OR (card_sound[at] AND card_room[at] >= l_vram[k]))
                   AND (NOT p_unchanged[n] OR card_seen[at] = l_version[k]) THEN
                    card_room[at] := card_room[at] - l_vram[k];
                    card_more[at] := card_more[at] + l_vram[k];
                    card_seen[at] := card_seen[at] + 1;
                    card_times[at] := card_times[at] + 1;
                    tried_l := k;
                ELSE
                    clash_gpus := clash_gpus || l_gpu[k];
                    EXIT;
                END IF;
            END LOOP;
        END IF;

        IF cardinality(clash_workers) > 0 OR cardinality(clash_gpus) > 0 THEN
            -- The half that was booked is taken back; nothing of it was written.
            FOR k IN w_from[n] .. tried_w LOOP
                at := array_position(host, w_id[k]);
                host_room[at] := host_room[at] + w_ram[k];
                host_more[at] := host_more[at] - w_ram[k];
                host_seen[at] := host_seen[at] - 1;
                host_times[at] := host_times[at] - 1;
            END LOOP;
            FOR k IN l_from[n] .. tried_l LOOP
                CONTINUE WHEN l_gpu[k] IS NULL;
                at := array_position(card, l_gpu[k]);
                card_room[at] := card_room[at] + l_vram[k];
                card_more[at] := card_more[at] - l_vram[k];
                card_seen[at] := card_seen[at] - 1;
                card_times[at] := card_times[at] - 1;
            END LOOP;
            instance_id := p_instance[n]; code := 'conflict';
            gpu_ids := clash_gpus; worker_ids := clash_workers;
            RETURN NEXT;
            CONTINUE;
        END IF;
        placed := placed || p_instance[n];
        IF p_over[n] THEN
            -- Asked for: rows that hold more than they have are marked, and take nothing new from here on.
            FOR k IN w_from[n] .. w_to[n] LOOP
                at := array_position(host, w_id[k]);
                IF w_ram[k] > 0 AND host_room[at] < 0 THEN
                    host_mark[at] := true;
                    host_sound[at] := false;
                END IF;
            END LOOP;
            FOR k IN l_from[n] .. l_to[n] LOOP
                at := array_position(card, l_gpu[k]);
                IF at IS NOT NULL AND card_room[at] < 0 THEN
                    card_mark[at] := true;
                    card_sound[at] := false;
                END IF;
            END LOOP;
        END IF;
    END LOOP;

    IF cardinality(placed) = 0 THEN
        RETURN;
    END IF;
    IF cardinality(w_id) > 0 THEN
        UPDATE workers w
           SET ram_allocated = w.ram_allocated + x.more, version = w.version + x.times, changed_in = xid,
               over_committed = w.over_committed OR x.mark
          FROM unnest(host, host_more, host_times, host_mark) AS x (id, more, times, mark)
         WHERE w.id = x.id AND x.times > 0;
    END IF;
    UPDATE gpu_devices g
       SET vram_allocated = g.vram_allocated + x.more, version = g.version + x.times, changed_in = xid,
           over_committed = g.over_committed OR x.mark
      FROM unnest(card, card_more, card_times, card_mark) AS x (id, more, times, mark)
     WHERE g.id = x.id AND x.times > 0;
    UPDATE model_instances i
       SET state = 'SCHEDULED', state_message = x.message, reasons = NULL,
           lease_owner = NULL, lease_until = NULL, next_attempt_at = NULL,
           worker_id = x.worker, worker_name = x.worker_name, worker_ip = x.worker_ip,
           worker_advertise_address = x.worker_address, worker_ifname = x.worker_ifname,
           gpu_type = x.gpu_type, gpu_indexes = x.gpu_indexes::jsonb, gpu_addresses = x.gpu_addresses::jsonb,
           computed_resource_claim = x.claim::jsonb, distributed_servers = x.distributed::jsonb,
           scheduled_at = clock_timestamp(), updated_at = now()
      FROM unnest(p_instance, p_worker, p_worker_name, p_worker_ip, p_worker_address, p_worker_ifname,
                  p_gpu_type, p_gpu_indexes, p_gpu_addresses, p_claim, p_distributed, p_message)
           AS x (id, worker, worker_name, worker_ip, worker_address, worker_ifname,
                 gpu_type, gpu_indexes, gpu_addresses, claim, distributed, message)
     WHERE i.id = x.id AND x.id = ANY (placed);
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
        SELECT x.id
          FROM gpustackd_take(p_owner, p_ids) t, unnest(t.ids, t.epochs) AS x (id, epoch)
         WHERE x.epoch = p_epochs[array_position(p_ids, x.id)]);
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
              WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname LIKE 'gpustackd\_%' LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path TO %I, pg_temp', f, current_schema());
    END LOOP;
END
$$;
ALTER FUNCTION gpustackd_commit SET plan_cache_mode TO force_generic_plan;
-- Everything here goes by primary keys. A plan made while a table was nearly empty would read the table instead,
-- and is kept while a burst fills it: half of the rate.
ALTER FUNCTION gpustackd_claim SET enable_seqscan TO off;
ALTER FUNCTION gpustackd_renew SET enable_seqscan TO off;
ALTER FUNCTION gpustackd_take SET enable_seqscan TO off;
ALTER FUNCTION gpustackd_commit SET enable_seqscan TO off;
ALTER FUNCTION gpustackd_refuse SET enable_seqscan TO off;
ALTER FUNCTION gpustackd_evict SET enable_seqscan TO off;
ALTER FUNCTION gpustackd_give_back SET enable_seqscan TO off;
ALTER FUNCTION gpustackd_instance_released SET enable_seqscan TO off;
