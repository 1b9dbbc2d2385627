-- wrk's part in gateway.py, which fills in the values.
local free, turn, said, counter, begun = {}, {}, {}, 0, 0
local system, reply, words, tools, model = %(system)s, %(reply)s, %(words)s, %(tools)s, "%(model)s"
for line in io.lines("%(sessions)s") do free[#free + 1] = line end
function delay() -- agents do not begin all at once
  begun = begun + 1
  return begun <= %(agents)d and begun * %(spread_ms)d / %(agents)d or 0
end
function request()
  if counter == 0 then -- wrk asks once at its start, and does not send that one
    counter = 1
    return wrk.format("GET", "/")
  end
  local session = table.remove(free, 1)
  counter = counter + 1
  local n = turn[session] or 0
  if n %% %(turns)d == 0 then
    said[session] = '{"role": "system", "content": ' .. system .. '}'
  else
    said[session] = said[session] .. ', {"role": "assistant", "content": ' .. reply .. '}'
  end
  said[session] = said[session] .. ', {"role": "user", "content": "' .. counter .. ': ' .. words .. '"}'
  turn[session] = n + 1
  local body = '{"model": "' .. model .. '", "tools": ' .. tools .. ', "messages": [' .. said[session] .. ']}'
  return wrk.format("POST", "/s/" .. session .. "/v1/chat/completions",
                    {["Content-Type"] = "application/json"}, body)
end
function response(status, headers, body)
  free[#free + 1] = headers["x-lockstep-session"]
end
function done(summary, latency, requests)
  print(string.format("RESULT %%f %%f %%d %%d", latency:percentile(50.0), latency:percentile(99.0),
    summary.requests,
    summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout))
end
