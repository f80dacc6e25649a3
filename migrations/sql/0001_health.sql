-- Workers by the age of their heartbeat, and what becomes of instances whose worker is lost. Times are the
-- database's; lengths (seconds) come in, among them how long the asking daemon has watched without a gap: what
-- nobody watched is no silence.

-- Seconds since a moment by this clock; a moment that is none (infinity) is not there yet, or long ago.
CREATE FUNCTION gpustackd_age(p_at timestamptz) RETURNS double precision
    LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN isfinite(p_at) THEN extract(epoch FROM clock_timestamp() - p_at)::double precision
                WHEN p_at > clock_timestamp() THEN 0 WHEN p_at IS NOT NULL THEN 1e9 END
$$;

-- When a state began. `stale_since` marks a NOT_READY that is ours, for its heartbeat: the next heartbeat takes
-- it back. Whoever else sets a state takes the mark away.
CREATE FUNCTION gpustackd_worker_state_since() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    NEW.state_since := clock_timestamp();
    IF NEW.stale_since IS NOT DISTINCT FROM OLD.stale_since THEN
        NEW.stale_since := NULL;
    END IF;
    NEW.lost_at := NULL;
    RETURN NEW;
END
$$;

CREATE TRIGGER workers_state_since BEFORE UPDATE OF state ON workers
    FOR EACH ROW WHEN (OLD.state <> NEW.state)
    EXECUTE FUNCTION gpustackd_worker_state_since();

CREATE FUNCTION gpustackd_worker_returned() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    UPDATE workers SET state = 'READY', state_message = NULL, stale_since = NULL
     WHERE id = NEW.id AND state = 'NOT_READY' AND stale_since IS NOT NULL;
    RETURN NULL;
END
$$;

CREATE TRIGGER workers_returned AFTER UPDATE OF heartbeat_at ON workers
    FOR EACH ROW WHEN (NEW.heartbeat_at > NEW.stale_since AND NEW.state = 'NOT_READY')
    EXECUTE FUNCTION gpustackd_worker_returned();

-- Clusters (0 = none) where so many workers are down at once that the observer is doubted first: more than
-- `p_share` of those that are up or went down, and at least `p_least`. Down is who was up and is silent, and who
-- is silent or was set so while instances are there; who has been given up (`lost_at`) does not count any more,
-- nor who is said to be gone for good (ERROR, DELETING).
CREATE FUNCTION gpustackd_doubtful(p_grace double precision, p_share double precision, p_least bigint)
    RETURNS TABLE (cluster bigint, down bigint, of bigint)
    LANGUAGE sql STABLE AS $$
    SELECT c, count(*) FILTER (WHERE d), count(*)
      FROM (SELECT coalesce(cluster_id, 0) AS c,
                   CASE WHEN state = 'READY' OR stale_since IS NOT NULL
                        THEN coalesce(heartbeat_at < clock_timestamp() - make_interval(secs => p_grace), false)
                        ELSE state IN ('NOT_READY', 'UNREACHABLE')
                             AND EXISTS (SELECT FROM instance_claims k WHERE k.worker_id = w.id) END AS d,
                   state = 'READY' AS up
              FROM workers w
             WHERE lost_at IS NULL AND state IN ('READY', 'NOT_READY', 'UNREACHABLE')) x
     WHERE d OR up
     GROUP BY c
    HAVING count(*) FILTER (WHERE d) > p_share * count(*) AND count(*) FILTER (WHERE d) >= p_least
$$;

-- One sweep over the workers: silent ones become NOT_READY. Returns those (`kind` stale), clusters in doubt
-- (`doubt`), one row `down` with the number of workers that are not there, whose instances need a look, and one
-- row `draining` with the number of those that are to be emptied.
-- `p_seen`: the silence that must have been watched; a worker that is there beats within it.
CREATE FUNCTION gpustackd_watch_workers(
        p_grace double precision, p_reschedule double precision, p_watched double precision,
        p_seen double precision, p_share double precision, p_least bigint)
    RETURNS TABLE (kind text, id bigint, name text, number bigint, of bigint)
    LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    silent bigint[];
    mine bigint[];
    gone bigint[];
    absent bigint;
    emptying bigint;
    doubted bigint[];
BEGIN
    SELECT array_agg(w.id) FILTER (WHERE w.state IN ('READY', 'PENDING', 'INITIALIZING')
                                     AND w.heartbeat_at < clock_timestamp() - make_interval(secs => p_grace)),
           array_agg(w.id) FILTER (WHERE w.state = 'NOT_READY' AND w.stale_since IS NOT NULL AND w.lost_at IS NULL
                                     AND w.heartbeat_at < clock_timestamp() - make_interval(secs => p_reschedule)),
           count(*) FILTER (WHERE w.state IN ('NOT_READY', 'UNREACHABLE', 'ERROR', 'DELETING')
                              AND w.lost_at IS NULL),
           count(*) FILTER (WHERE w.state = 'MAINTENANCE' AND w.maintenance @> '{"drain": true}')
      INTO silent, gone, absent, emptying FROM workers w;
    IF silent IS NOT NULL OR absent > 0 THEN
        FOR id, number, of IN SELECT d.cluster, d.down, d.of FROM gpustackd_doubtful(p_grace, p_share, p_least) d LOOP
            kind := 'doubt';
            doubted := doubted || id;
            SELECT c.name INTO name FROM clusters c WHERE c.id = gpustackd_watch_workers.id;
            RETURN NEXT;
        END LOOP;
    END IF;
    PERFORM set_config('lock_timeout', gpustackd_yielding()::text, true);
    IF silent IS NOT NULL AND p_watched >= p_seen THEN
        mine := ARRAY(SELECT w.id FROM workers w WHERE w.id = ANY (silent) ORDER BY w.id FOR NO KEY UPDATE SKIP LOCKED);
        FOR id, name, number IN
            UPDATE workers w
               SET state = 'NOT_READY', stale_since = clock_timestamp(),
                   state_message = format('no heartbeat for %s s', floor(gpustackd_age(w.heartbeat_at)))
             WHERE w.id = ANY (mine) AND w.state IN ('READY', 'PENDING', 'INITIALIZING')
               AND w.heartbeat_at < clock_timestamp() - make_interval(secs => p_grace)
            RETURNING w.id, w.name, floor(gpustackd_age(w.heartbeat_at))::bigint
        LOOP
            kind := 'stale';
            of := NULL;
            absent := absent + 1;
            RETURN NEXT;
        END LOOP;
    END IF;
    -- Given up: its instances are elsewhere, it was not one of many. Until it returns it counts no more.
    IF gone IS NOT NULL AND p_watched >= p_reschedule THEN
        UPDATE workers w SET lost_at = clock_timestamp()
         WHERE w.id = ANY (ARRAY(SELECT x.id FROM workers x WHERE x.id = ANY (gone)
                                   AND NOT coalesce(x.cluster_id, 0) = ANY (coalesce(doubted, '{}'))
                                   AND NOT EXISTS (SELECT FROM instance_claims k WHERE k.worker_id = x.id)
                                 ORDER BY x.id FOR NO KEY UPDATE SKIP LOCKED))
           AND w.state = 'NOT_READY' AND w.stale_since IS NOT NULL;
    END IF;
    kind := 'down'; id := NULL; name := NULL; number := absent; of := NULL;
    RETURN NEXT;
    kind := 'draining'; number := emptying;
    RETURN NEXT;
END
$$;

-- Milliseconds that a sweep waits for a lock: less than the server's deadlock time-out, so that it is the
-- sweep that yields, and the next one tries again.
CREATE FUNCTION gpustackd_yielding() RETURNS integer
    LANGUAGE sql STABLE AS $$
    SELECT (extract(epoch FROM current_setting('deadlock_timeout')::interval) * 300)::int
$$;

-- Lock instances that meet a condition of the caller's, and after them, in order, everything that they hold.
CREATE FUNCTION gpustackd_lock_held(p_ids bigint[]) RETURNS void
    LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM workers
      WHERE id = ANY (ARRAY(SELECT DISTINCT worker_id FROM instance_claims WHERE instance_id = ANY (p_ids)))
      ORDER BY id FOR NO KEY UPDATE;
    PERFORM 1 FROM gpu_devices
      WHERE id = ANY (ARRAY(SELECT DISTINCT gpu_device_id FROM instance_claims WHERE instance_id = ANY (p_ids)))
      ORDER BY id FOR NO KEY UPDATE;
END
$$;

-- Workers that are not there, for how long, and whether what is on them is to go: `due`. A part of a distributed
-- instance (`due_spanning`) is not waited for: the rest of it cannot serve without.
CREATE FUNCTION gpustackd_absent(
        p_grace double precision, p_reschedule double precision, p_unreachable double precision,
        p_watched double precision, p_share double precision, p_least bigint)
    RETURNS TABLE (id bigint, told text, marks boolean, due boolean, due_spanning boolean)
    LANGUAGE sql STABLE AS $$
    SELECT w.id,
           format('worker %s is %s%s', w.name, w.state, coalesce(' (' || w.state_message || ')', '')),
           w.stale_since IS NULL OR p_watched >= p_grace,
           CASE WHEN w.stale_since IS NOT NULL THEN least(t.silence, p_watched) >= p_reschedule
                WHEN w.state = 'UNREACHABLE' AND coalesce(t.silence <= p_grace, true)
                THEN least(t.lasting, p_watched) >= p_unreachable
                ELSE least(greatest(t.lasting, t.silence), p_watched) >= p_reschedule END,
           w.state <> 'UNREACHABLE' AND (w.stale_since IS NULL OR p_watched >= p_grace)
      FROM workers w,
           LATERAL (SELECT gpustackd_age(w.heartbeat_at) AS silence,
                           gpustackd_age(coalesce(w.state_since, w.created_at)) AS lasting) t
     WHERE w.state IN ('NOT_READY', 'UNREACHABLE', 'ERROR', 'DELETING')
       AND coalesce(w.cluster_id, 0) NOT IN (SELECT d.cluster FROM gpustackd_doubtful(p_grace, p_share, p_least) d)
$$;

-- Level-triggered: what a worker that is not there had taken becomes UNREACHABLE; what has been so for too long
-- goes back to PENDING, whole, fenced by its epoch. At most `p_limit` instances a call; one row for each.
CREATE FUNCTION gpustackd_leave_workers(
        p_grace double precision, p_reschedule double precision, p_unreachable double precision,
        p_watched double precision, p_share double precision, p_least bigint, p_limit bigint)
    RETURNS TABLE (kind text, id bigint, name text, model_id bigint, worker text, told text)
    LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    taken constant text[] := ARRAY['INITIALIZING', 'DOWNLOADING', 'STARTING', 'RUNNING'];
    mine bigint[];
    hosts bigint[];
    words text[];
    marks boolean[];
    dues boolean[];
    spanning boolean[];
    going bigint[] := '{}';
    staying bigint[] := '{}';
    why text[] := '{}';
    marked_why text[] := '{}';
    one record;
BEGIN
    SELECT array_agg(a.id), array_agg(a.told), array_agg(a.marks), array_agg(a.due), array_agg(a.due_spanning)
      INTO hosts, words, marks, dues, spanning
      FROM gpustackd_absent(p_grace, p_reschedule, p_unreachable, p_watched, p_share, p_least) a
     WHERE EXISTS (SELECT FROM instance_claims k WHERE k.worker_id = a.id);
    IF hosts IS NULL THEN
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', gpustackd_yielding()::text, true);
    -- Locked in order, instances first; who else has one locked decides about it.
    mine := ARRAY(
        SELECT i.id FROM model_instances i
         WHERE i.id = ANY (ARRAY(
                   SELECT x.id
                     FROM (SELECT k.instance_id AS id, bool_or(dues[array_position(hosts, k.worker_id)]) AS due,
                                  bool_or(spanning[array_position(hosts, k.worker_id)]) AS span,
                                  bool_or(marks[array_position(hosts, k.worker_id)]) AS mark
                             FROM instance_claims k WHERE k.worker_id = ANY (hosts) GROUP BY k.instance_id) x
                     JOIN model_instances o ON o.id = x.id
                    WHERE x.due OR (x.mark AND o.state = ANY (taken))
                       OR (x.span AND (SELECT count(DISTINCT k.worker_id) > 1 FROM instance_claims k
                                        WHERE k.instance_id = x.id))))
         ORDER BY i.id LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED);
    IF cardinality(mine) = 0 THEN
        RETURN;
    END IF;
    PERFORM gpustackd_lock_held(mine);
    -- A new look, now that nothing can change: a heartbeat may have come while we waited.
    FOR one IN
        SELECT i.id, i.name, i.state, i.model_id, i.worker_name,
               bool_or(a.due) OR (bool_or(a.due_spanning) AND max(s.workers) > 1) AS goes, bool_or(a.marks) AS marks,
               (array_agg(a.told ORDER BY a.due DESC, a.id))[1] AS told
          FROM model_instances i
          JOIN instance_claims k ON k.instance_id = i.id
          JOIN gpustackd_absent(p_grace, p_reschedule, p_unreachable, p_watched, p_share, p_least) a
            ON a.id = k.worker_id,
               LATERAL (SELECT count(DISTINCT x.worker_id) AS workers FROM instance_claims x
                         WHERE x.instance_id = i.id) s
         WHERE i.id = ANY (mine) AND i.worker_id IS NOT NULL
         GROUP BY i.id, i.name, i.state, i.model_id, i.worker_name
         ORDER BY i.id
    LOOP
        id := one.id; name := one.name; model_id := one.model_id; worker := one.worker_name; told := one.told;
        IF one.goes THEN
            going := going || one.id;
            why := why || one.told;
            kind := 'evicted';
        ELSIF one.marks AND one.state = ANY (taken) THEN
            staying := staying || one.id;
            marked_why := marked_why || one.told;
            kind := 'unreachable';
        ELSE
            CONTINUE;
        END IF;
        RETURN NEXT;
    END LOOP;
    UPDATE model_instances i SET state = 'UNREACHABLE', state_message = x.w, updated_at = now()
      FROM unnest(staying, marked_why) AS x (id, w)
     WHERE i.id = x.id;
    FOR one IN SELECT x.w, array_agg(x.i) AS ids FROM unnest(going, why) AS x (i, w) GROUP BY x.w LOOP
        PERFORM gpustackd_evict(one.ids, one.w || '; the instance is placed anew');
    END LOOP;
END
$$;
