-- A node takes over what its earlier boots left: which of these anchors still count, and what a Redis that lost them lacks.
-- KEYS: epoch, revision, events, then one hash per pool (field: sample id, value: anchor as JSON)
-- ARGV: claim as JSON {node, holder, epoch: last known, new_epoch, highest, pool_ttl, pools: [[{sample, length, sequence, uses, slots}]]}
-- Returns JSON {epoch, cursor, revision, upserts: [[pool key, sample, anchor]], deletes: [[pool key, sample]]}

local claim = cjson.decode(ARGV[1])
local epoch = redis.call('GET', KEYS[1])
if not epoch then
  epoch = claim.new_epoch
  redis.call('SET', KEYS[1], epoch)
end
local lost = epoch ~= claim.epoch -- another Redis than the one that took the anchors in: it cannot have pruned them
if tonumber(redis.call('GET', KEYS[2]) or '0') < claim.highest then
  redis.call('SET', KEYS[2], string.format('%d', claim.highest))
end

local upserts, deletes = {}, {}
for index, anchors in ipairs(claim.pools) do
  local key = KEYS[3 + index]
  for _, mine in ipairs(anchors) do
    local text = redis.call('HGET', key, mine.sample)
    local found = text and cjson.decode(text)
    if found and found.node == claim.node and found.holder ~= claim.holder and found.sequence == mine.sequence then
      found.holder, found.slots = claim.holder, mine.slots
      text = cjson.encode(found)
      redis.call('HSET', key, mine.sample, text)
    elseif not found and lost then
      text = cjson.encode({
        node = claim.node, holder = claim.holder,
        length = mine.length, sequence = mine.sequence, uses = mine.uses, slots = mine.slots,
      })
      redis.call('HSET', key, mine.sample, text)
    end
    table.insert(text and upserts or deletes, {key, mine.sample, text or nil})
  end
  redis.call('EXPIRE', key, claim.pool_ttl)
end

local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)[1]
return cjson.encode({
  epoch = epoch, cursor = last and last[1] or '0', revision = tonumber(redis.call('GET', KEYS[2]) or '0'),
  upserts = upserts, deletes = deletes,
})
