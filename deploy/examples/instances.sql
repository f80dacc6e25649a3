-- Sixty instances of the example models; each statement is a burst. Run it with psql after applying fleet.yaml and
-- models.yaml. A daemon places what fits within a second and says why the rest has to wait.
--
-- The smallest useful act is one row:  INSERT INTO model_instances (name, model_id) VALUES ('qwen-1', 1);

-- Large models first, and one that no machine of the fleet can hold.
INSERT INTO model_instances (name, model_id)
SELECT m.name || '-' || n, m.id
  FROM (VALUES ('qwen2.5-72b', 1, 3), ('qwen3-32b', 1, 2), ('qwen3-30b-a3b', 1, 2), ('deepseek-r1', 1, 1),
               ('bge-base-en', 1, 2)) AS wanted (model, first, last)
  JOIN models m ON m.name = wanted.model, generate_series(wanted.first, wanted.last) AS n;

INSERT INTO model_instances (name, model_id)
SELECT m.name || '-' || n, m.id
  FROM (VALUES ('qwen3-32b', 3, 4), ('qwen2.5-14b', 1, 3), ('qwen2.5-7b', 1, 3),
               ('qwen3-embedding-0.6b', 1, 2)) AS wanted (model, first, last)
  JOIN models m ON m.name = wanted.model, generate_series(wanted.first, wanted.last) AS n;

-- A label that no worker carries, and a card of a worker in maintenance.
INSERT INTO model_instances (name, model_id)
SELECT m.name || '-' || n, m.id
  FROM (VALUES ('mixtral-8x7b', 1, 2), ('llama-3.1-8b', 1, 2), ('qwen3-30b-a3b', 3, 4), ('qwen3-8b', 1, 2),
               ('qwen3-4b', 1, 2)) AS wanted (model, first, last)
  JOIN models m ON m.name = wanted.model, generate_series(wanted.first, wanted.last) AS n;

INSERT INTO model_instances (name, model_id)
SELECT m.name || '-' || n, m.id
  FROM (VALUES ('qwen2.5-14b', 4, 6), ('qwen3-4b', 3, 5), ('qwen3-0.6b', 1, 2), ('qwen2.5-0.5b', 1, 2))
       AS wanted (model, first, last)
  JOIN models m ON m.name = wanted.model, generate_series(wanted.first, wanted.last) AS n;

INSERT INTO model_instances (name, model_id)
SELECT m.name || '-' || n, m.id
  FROM (VALUES ('qwen2.5-7b', 4, 8), ('qwen3-8b', 3, 5), ('qwen3-0.6b', 3, 4)) AS wanted (model, first, last)
  JOIN models m ON m.name = wanted.model, generate_series(wanted.first, wanted.last) AS n;

-- By now the large cards are taken: some of these have to wait until one is given back.
INSERT INTO model_instances (name, model_id)
SELECT m.name || '-' || n, m.id
  FROM (VALUES ('qwen2.5-7b', 9, 10), ('qwen3-8b', 6, 8), ('deepseek-r1', 2, 2), ('bge-base-en', 3, 4),
               ('qwen3-0.6b', 5, 5), ('qwen2.5-0.5b', 3, 3)) AS wanted (model, first, last)
  JOIN models m ON m.name = wanted.model, generate_series(wanted.first, wanted.last) AS n;
