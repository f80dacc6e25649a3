-- Models whose `replicas` is a number have so many instances: who hears of it, and how the number is made so.

-- Told by model id: a number, a schedule or roles that changed, rows that appeared or went by other hands than
-- the daemon's. A model without a number tells nothing.
CREATE FUNCTION gpustackd_tell_replicas(p_models bigint[]) RETURNS void
    LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(p_models) BETWEEN 1 AND 300 THEN
        PERFORM gpustackd_notify('replicas ' || array_to_string(p_models, ','));
    ELSIF cardinality(p_models) > 300 THEN
        PERFORM gpustackd_notify('replicas');  -- look yourself
    END IF;
END
$$;

CREATE FUNCTION gpustackd_numbers_given() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    PERFORM gpustackd_tell_replicas(ARRAY(
        SELECT id FROM given WHERE replicas IS NOT NULL OR scaling_schedule IS NOT NULL ORDER BY id LIMIT 301));
    RETURN NULL;
END
$$;

CREATE TRIGGER models_numbers_given AFTER INSERT ON models
    REFERENCING NEW TABLE AS given
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_numbers_given();

CREATE FUNCTION gpustackd_number_changed() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    PERFORM gpustackd_tell_replicas(ARRAY[NEW.id]);
    RETURN NULL;
END
$$;

CREATE TRIGGER models_number_changed AFTER UPDATE OF replicas, scaling_schedule, roles ON models
    FOR EACH ROW
    WHEN ((OLD.replicas, OLD.scaling_schedule, OLD.roles)
          IS DISTINCT FROM (NEW.replicas, NEW.scaling_schedule, NEW.roles)
          AND (NEW.replicas IS NOT NULL OR NEW.scaling_schedule IS NOT NULL))
    EXECUTE FUNCTION gpustackd_number_changed();

-- A schedule that is paused stops the model: once, when the pause begins. Who wants replicas during a pause may
-- write a number.
CREATE FUNCTION gpustackd_paused() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    NEW.replicas := 0;
    RETURN NEW;
END
$$;

CREATE TRIGGER models_paused_insert BEFORE INSERT ON models
    FOR EACH ROW
    WHEN (NEW.scaling_schedule @> '{"enabled": true, "paused": true}')
    EXECUTE FUNCTION gpustackd_paused();
CREATE TRIGGER models_paused BEFORE UPDATE OF scaling_schedule ON models
    FOR EACH ROW
    WHEN (NEW.scaling_schedule @> '{"enabled": true, "paused": true}'
          AND coalesce(OLD.scaling_schedule @> '{"enabled": true, "paused": true}', false) IS FALSE)
    EXECUTE FUNCTION gpustackd_paused();

-- Rows by other hands than the daemon's: a daemon that brings a number about tells nobody of it.
CREATE FUNCTION gpustackd_members_changed() RETURNS trigger
    LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('gpustackd.syncing', true) IS DISTINCT FROM 'on' THEN
        PERFORM gpustackd_tell_replicas(ARRAY(
            SELECT m.id FROM models m
             WHERE m.id = ANY (ARRAY(SELECT DISTINCT model_id FROM members)) AND m.replicas IS NOT NULL
             ORDER BY m.id LIMIT 301));
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER model_instances_members_new AFTER INSERT ON model_instances
    REFERENCING NEW TABLE AS members
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_members_changed();
CREATE TRIGGER model_instances_members_gone AFTER DELETE ON model_instances
    REFERENCING OLD TABLE AS members
    FOR EACH STATEMENT EXECUTE FUNCTION gpustackd_members_changed();

-- What a decision about a model's replicas rests on, in two words: who is there, and how they stand.
CREATE FUNCTION gpustackd_members(p_model bigint, OUT who text, OUT standing text)
    LANGUAGE sql STABLE AS $$
    SELECT md5(string_agg(format('%s:%s:%s:%s', i.id, extract(epoch FROM i.draining_since), i.role, i.group_id),
                          ',' ORDER BY i.id)),
           md5(string_agg(format('%s:%s:%s:%s', i.id, CASE WHEN i.state NOT IN ('PENDING', 'ANALYZING') THEN i.state END,
                                 i.worker_id, w.state), ',' ORDER BY i.id))
      FROM model_instances i LEFT JOIN workers w ON w.id = i.worker_id
     WHERE i.model_id = p_model
$$;

-- Bring a model's replicas to its number, by steps that were decided on what was seen. Nothing is written unless
-- it is still so: the row of the model is the guard, one replica at a time, and whoever finds it locked comes
-- again. Returns `done`, or why not: `busy`, `changed`, `gone`, `taken` (names; what could be added was).
CREATE FUNCTION gpustackd_sync_replicas(
        p_model bigint, p_replicas bigint, p_who text, p_standing text,
        p_add int[], p_names text[], p_seat int[], p_roles text[], p_groups text[],
        p_delete bigint[], p_drain bigint[], p_take_back bigint[])
    RETURNS text
    LANGUAGE plpgsql AS $$
DECLARE
    asked bigint;
    seen record;
    locked bigint;
    added int;
    short boolean := false;
BEGIN
    PERFORM set_config('gpustackd.syncing', 'on', true);
    PERFORM set_config('lock_timeout',
                       (extract(epoch FROM current_setting('deadlock_timeout')::interval) * 300)::int::text, true);
    IF cardinality(p_delete) > 0 THEN
        DELETE FROM model_instances WHERE false;  -- the turn of those who delete (0001_turns) comes before rows
    END IF;
    SELECT m.replicas INTO asked FROM models m WHERE m.id = p_model FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN CASE WHEN EXISTS (SELECT FROM models WHERE id = p_model) THEN 'busy' ELSE 'gone' END;
    END IF;
    IF asked IS DISTINCT FROM p_replicas THEN
        RETURN 'changed';
    END IF;
    IF cardinality(p_delete) + cardinality(p_drain) + cardinality(p_take_back) > 0 THEN
        -- A row that somebody holds is being placed, reported on or deleted: what becomes of it counts.
        SELECT count(*) INTO locked
          FROM (SELECT 1 FROM model_instances WHERE model_id = p_model ORDER BY id FOR NO KEY UPDATE SKIP LOCKED) x;
        IF locked <> (SELECT count(*) FROM model_instances WHERE model_id = p_model) THEN
            RETURN 'busy';
        END IF;
    END IF;
    SELECT who, standing INTO seen FROM gpustackd_members(p_model);
    IF seen.who IS DISTINCT FROM p_who
       OR (cardinality(p_delete) + cardinality(p_drain) > 0 AND seen.standing IS DISTINCT FROM p_standing) THEN
        RETURN 'changed';
    END IF;
    UPDATE model_instances SET draining_since = NULL, updated_at = now() WHERE id = ANY (p_take_back);
    UPDATE model_instances SET draining_since = clock_timestamp(), updated_at = now() WHERE id = ANY (p_drain);
    DELETE FROM model_instances WHERE id = ANY (p_delete);
    FOR n IN 1 .. cardinality(p_add) LOOP
        INSERT INTO model_instances (name, model_id, role, group_id)
        SELECT x.name, p_model, p_roles[n], p_groups[n]
          FROM unnest(p_names, p_seat) WITH ORDINALITY AS x (name, seat, rank)
         WHERE x.seat = n AND NOT EXISTS (SELECT FROM model_instances i WHERE i.name = x.name)
         ORDER BY x.rank LIMIT p_add[n]
        ON CONFLICT (name) DO NOTHING;
        GET DIAGNOSTICS added = ROW_COUNT;
        short := short OR added < p_add[n];
    END LOOP;
    RETURN CASE WHEN short THEN 'taken' ELSE 'done' END;
END
$$;
