-- What becomes of placed instances that nobody takes, that fail, or that are to leave. Each write says what it
-- expects (state, epoch, counter), so that a late daemon, or a second one, gets zero rows.

-- Entries of `avoid` that still hold.
CREATE FUNCTION gpustackd_avoided(p_avoid jsonb) RETURNS jsonb
    LANGUAGE sql STABLE AS $$
    SELECT jsonb_agg(x.value)
      FROM jsonb_array_elements(CASE jsonb_typeof(p_avoid) WHEN 'array' THEN p_avoid ELSE '[]' END) x
     WHERE CASE jsonb_typeof(x.value -> 'until')
                WHEN 'number' THEN (x.value ->> 'until')::numeric > extract(epoch FROM clock_timestamp()) END
$$;

-- One more place to avoid, for so many seconds. `p_gpus` NULL = the whole worker.
CREATE FUNCTION gpustackd_avoid_also(p_avoid jsonb, p_worker bigint, p_gpus jsonb, p_seconds double precision)
    RETURNS jsonb
    LANGUAGE sql STABLE AS $$
    SELECT coalesce(gpustackd_avoided(p_avoid), '[]') || jsonb_build_array(jsonb_build_object(
               'worker_id', p_worker, 'gpu_ids', p_gpus,
               'until', extract(epoch FROM clock_timestamp())::numeric + p_seconds::numeric))
$$;

CREATE FUNCTION gpustackd_moment(p_text text) RETURNS timestamptz
    LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN p_text::timestamptz;
EXCEPTION WHEN data_exception THEN
    RETURN NULL;  -- what is no time is no deadline
END
$$;

-- SCHEDULED and not taken within the window, by a worker that is managed by heartbeat; UNREACHABLE although its
-- workers are there, for too long; RUNNING so long that its failures are history. One row for each.
CREATE FUNCTION gpustackd_overdue(
        p_window double precision, p_unreachable double precision, p_stable double precision,
        p_avoid double precision, p_watched double precision, p_grace double precision,
        p_share double precision, p_least bigint, p_limit bigint)
    RETURNS TABLE (kind text, id bigint, name text, model_id bigint, worker text, told text)
    LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    untaken bigint[];
    adrift bigint[];
    steady bigint[];
    mine bigint[];
    doubted bigint[];
    one record;
BEGIN
    SELECT array_agg(i.id) FILTER (WHERE i.state = 'SCHEDULED'),
           array_agg(i.id) FILTER (WHERE i.state = 'UNREACHABLE'),
           array_agg(i.id) FILTER (WHERE i.state = 'RUNNING')
      INTO untaken, adrift, steady
      FROM model_instances i
     WHERE (i.state = 'SCHEDULED' AND i.scheduled_at < clock_timestamp() - make_interval(secs => p_window)
            AND p_watched >= p_window)
        OR (i.state = 'UNREACHABLE' AND i.state_since < clock_timestamp() - make_interval(secs => p_unreachable)
            AND p_watched >= p_unreachable)
        OR (i.state = 'RUNNING' AND (i.restart_count > 0 OR i.failures > 0)
            AND i.state_since < clock_timestamp() - make_interval(secs => p_stable));
    PERFORM set_config('lock_timeout', gpustackd_yielding()::text, true);
    IF untaken IS NOT NULL OR adrift IS NOT NULL THEN
        doubted := ARRAY(SELECT d.cluster FROM gpustackd_doubtful(p_grace, p_share, p_least) d);
        mine := ARRAY(
            SELECT i.id FROM model_instances i JOIN workers w ON w.id = i.worker_id
             WHERE i.id = ANY (untaken || adrift) AND NOT coalesce(w.cluster_id, 0) = ANY (doubted)
               AND CASE i.state WHEN 'SCHEDULED' THEN w.heartbeat_at IS NOT NULL
                        ELSE w.state NOT IN ('NOT_READY', 'UNREACHABLE', 'ERROR', 'DELETING') END
             ORDER BY i.id LIMIT p_limit FOR NO KEY UPDATE OF i SKIP LOCKED);
        PERFORM gpustackd_lock_held(mine);
        FOR one IN
            SELECT i.id, i.name, i.state, i.model_id, i.worker_id, i.worker_name, w.heartbeat_at
              FROM model_instances i JOIN workers w ON w.id = i.worker_id
             WHERE i.id = ANY (mine)
               AND ((i.state = 'SCHEDULED' AND w.heartbeat_at IS NOT NULL
                     AND i.scheduled_at < clock_timestamp() - make_interval(secs => p_window))
                    OR (i.state = 'UNREACHABLE'
                        AND i.state_since < clock_timestamp() - make_interval(secs => p_unreachable)))
             ORDER BY i.id
        LOOP
            id := one.id; name := one.name; model_id := one.model_id; worker := one.worker_name;
            IF one.state = 'SCHEDULED' THEN
                kind := 'untaken';
                told := format('worker %s did not take it within %s s', one.worker_name, p_window);
            ELSE
                kind := 'adrift';
                told := format('worker %s is there, but did not report it for %s s', one.worker_name, p_unreachable);
            END IF;
            PERFORM gpustackd_evict(ARRAY[one.id], told || '; the instance is placed anew');
            UPDATE model_instances i
               SET avoid = gpustackd_avoid_also(i.avoid, one.worker_id, NULL, p_avoid)
             WHERE i.id = one.id;
            RETURN NEXT;
        END LOOP;
    END IF;
    IF steady IS NOT NULL THEN
        UPDATE model_instances i SET restart_count = 0, failures = 0
         WHERE i.id = ANY (ARRAY(SELECT x.id FROM model_instances x WHERE x.id = ANY (steady)
                                  ORDER BY x.id FOR NO KEY UPDATE SKIP LOCKED))
           AND i.state = 'RUNNING'
           AND i.state_since < clock_timestamp() - make_interval(secs => p_stable);
    END IF;
END
$$;

-- Restart in place: ERROR -> SCHEDULED where state, epoch and counter are as the caller saw them.
CREATE FUNCTION gpustackd_restart(p_ids bigint[], p_epochs bigint[], p_counts bigint[]) RETURNS SETOF bigint
    LANGUAGE plpgsql AS $$
DECLARE
    mine bigint[];
BEGIN
    mine := ARRAY(SELECT id FROM model_instances WHERE id = ANY (p_ids) AND state = 'ERROR'
                   ORDER BY id FOR NO KEY UPDATE SKIP LOCKED);
    RETURN QUERY
    UPDATE model_instances i
       SET state = 'SCHEDULED', state_message = NULL, restart_count = i.restart_count + 1,
           last_restart_time = clock_timestamp(), updated_at = now()
      FROM unnest(p_ids, p_epochs, p_counts) AS x (id, epoch, count)
     WHERE i.id = x.id AND i.id = ANY (mine) AND i.worker_id IS NOT NULL
       AND i.placement_epoch = x.epoch AND i.restart_count = x.count
    RETURNING i.id;
END
$$;

-- Release the place of an instance in ERROR and have it placed anew: elsewhere where `p_gpus` (a list of GPU ids,
-- or anything else for the whole worker; NULL = nothing) is to be avoided, with more memory where `p_raise` says so.
CREATE FUNCTION gpustackd_replace(
        p_id bigint, p_epoch bigint, p_count bigint, p_why text, p_gpus jsonb, p_avoid double precision,
        p_raise jsonb)
    RETURNS boolean
    LANGUAGE plpgsql AS $$
DECLARE
    was record;
BEGIN
    PERFORM set_config('lock_timeout', gpustackd_yielding()::text, true);
    SELECT worker_id, avoid INTO was FROM model_instances
     WHERE id = p_id AND state = 'ERROR' AND worker_id IS NOT NULL AND placement_epoch = p_epoch
       AND restart_count = p_count
       FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM gpustackd_evict(ARRAY[p_id], p_why);
    UPDATE model_instances
       SET restart_count = restart_count + 1, last_restart_time = clock_timestamp(),
           claim_raise = coalesce(p_raise, claim_raise),
           avoid = CASE WHEN p_gpus IS NULL THEN avoid
                        ELSE gpustackd_avoid_also(avoid, was.worker_id,
                                                  CASE jsonb_typeof(p_gpus) WHEN 'array' THEN p_gpus END, p_avoid) END
     WHERE id = p_id;
    RETURN true;
END
$$;

-- One replica leaves a worker that is being drained, unless fewer than the available minimum of its model would
-- run then. One at a time for a model, whichever daemon asks.
CREATE FUNCTION gpustackd_drain(p_id bigint, p_epoch bigint) RETURNS boolean
    LANGUAGE plpgsql AS $$
DECLARE
    one record;
    at record;
    running bigint;
    least_of bigint;
BEGIN
    SELECT id, model_id INTO one FROM model_instances WHERE id = p_id;
    IF NOT FOUND OR NOT pg_try_advisory_xact_lock(
            hashtextextended('gpustackd drain ' || current_schema() || ' ' || one.model_id, 0)) THEN
        RETURN false;
    END IF;
    PERFORM set_config('lock_timeout', gpustackd_yielding()::text, true);
    SELECT id, state, worker_id INTO one FROM model_instances
     WHERE id = p_id AND placement_epoch = p_epoch AND worker_id IS NOT NULL
       FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM gpustackd_lock_held(ARRAY[p_id]);
    SELECT w.name, coalesce(gpustackd_moment(w.maintenance ->> 'deadline') <= clock_timestamp(), false) AS overdue
      INTO at FROM workers w
     WHERE w.state = 'MAINTENANCE' AND w.maintenance @> '{"drain": true}'
       AND w.id = ANY (ARRAY(SELECT k.worker_id FROM instance_claims k WHERE k.instance_id = p_id))
     ORDER BY w.id LIMIT 1;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF one.state = 'RUNNING' AND NOT at.overdue THEN
        SELECT count(*) FILTER (WHERE i.state = 'RUNNING' AND i.draining_since IS NULL),
               coalesce(m.min_available, greatest(coalesce(m.replicas, count(*)) - 1, 0))
          INTO running, least_of
          FROM model_instances i JOIN models m ON m.id = i.model_id
         WHERE i.model_id = (SELECT model_id FROM model_instances WHERE id = p_id)
         GROUP BY m.id;
        IF running - 1 < least_of THEN
            RETURN false;
        END IF;
    END IF;
    PERFORM gpustackd_evict(ARRAY[p_id], format('worker %s is being drained; the instance is placed anew', at.name));
    RETURN true;
END
$$;
