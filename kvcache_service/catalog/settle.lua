-- One turn's commit: usage, inserts and prunes of all its pools in one atomic step.
-- KEYS: turn, revision, events, then one hash per pool (field: sample id, value: anchor as JSON)
-- ARGV: commit as JSON {node, holder, bound, window, turn_ttl, pool_ttl,
-- pools: [{uses: [sample], inserts: [{sample, length, slot}], removes: [sample]}]}
-- Returns JSON {repeated, revision, accepted: [[pool, sample, slot]], upserts: [[pool key, sample, anchor]], deletes: [[pool key, sample]]}

local done = redis.call('GET', KEYS[1])
if done then
  local result = cjson.decode(done)
  result.repeated = true
  return cjson.encode(result)
end

local commit = cjson.decode(ARGV[1])
local revision = redis.call('INCR', KEYS[2])
local accepted, upserts, deletes = {}, {}, {}

local function write(key, sample, anchor)
  local text = cjson.encode(anchor)
  redis.call('HSET', key, sample, text)
  table.insert(upserts, {key, sample, text})
end

local function insert(index, key, entry)
  local text = redis.call('HGET', key, entry.sample)
  local anchor = text and cjson.decode(text)
  if not anchor or anchor.holder ~= commit.holder then
    anchor = {length = entry.length, node = commit.node, holder = commit.holder, sequence = revision, uses = 0, slots = {}}
  end
  for _, slot in ipairs(anchor.slots) do
    if slot == entry.slot then return end
  end
  table.insert(anchor.slots, entry.slot)
  write(key, entry.sample, anchor)
  table.insert(accepted, {index, entry.sample, entry.slot})
end

-- An anchor that another boot has written since is not this one's to remove.
local function remove(key, sample)
  local text = redis.call('HGET', key, sample)
  if text and cjson.decode(text).holder == commit.holder then
    redis.call('HDEL', key, sample)
    table.insert(deletes, {key, sample})
  end
end

-- Least used among the oldest (KVCOMM, pool bound V).
local function prune(key)
  local surplus = redis.call('HLEN', key) - commit.bound
  if surplus <= 0 then return end
  local flat, anchors = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do
    local anchor = cjson.decode(flat[i + 1])
    anchor.sample = flat[i]
    table.insert(anchors, anchor)
  end
  table.sort(anchors, function(a, b)
    if a.sequence ~= b.sequence then return a.sequence < b.sequence end
    return a.sample < b.sample
  end)
  for _ = 1, surplus do
    local victim = 1
    for i = 2, math.min(commit.window, #anchors) do
      if anchors[i].uses < anchors[victim].uses then victim = i end
    end
    local anchor = table.remove(anchors, victim)
    redis.call('HDEL', key, anchor.sample)
    table.insert(deletes, {key, anchor.sample})
  end
end

for index, pool in ipairs(commit.pools) do
  local key = KEYS[3 + index]
  for _, sample in ipairs(pool.uses) do
    local text = redis.call('HGET', key, sample)
    if text then
      local anchor = cjson.decode(text)
      anchor.uses = anchor.uses + 1
      write(key, sample, anchor)
    end
  end
  for _, entry in ipairs(pool.inserts) do insert(index, key, entry) end
  for _, sample in ipairs(pool.removes) do remove(key, sample) end
  prune(key)
  redis.call('EXPIRE', key, commit.pool_ttl)
end

local result = cjson.encode({
  repeated = false, revision = revision, accepted = accepted, upserts = upserts, deletes = deletes,
})
redis.call('SET', KEYS[1], result, 'EX', commit.turn_ttl)
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 10000, '*', 'event', result)
redis.call('EXPIRE', KEYS[3], commit.pool_ttl)
return result
