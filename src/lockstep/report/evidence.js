// The proof of a finding: tokens of a row, and the expected ones.

function places(piece) {
  return piece.end - piece.begin > 1 ? `tokens ${piece.begin} to ${piece.end - 1}` : `token ${piece.begin}`;
}

// [{id, place, rollout, trainer, difference}] of a stretch of a row.
function tokensBetween(t, begin, end) {
  const out = [];
  for (const segment of t.segments) {
    const first = Math.max(begin, segment.begin), last = Math.min(end, segment.begin + segment.token_ids.length);
    for (let place = first; place < last; place += 1) {
      const at = place - segment.begin;
      out.push({ id: segment.token_ids[at], place, rollout: segment.rollout_logprobs?.[at], trainer: segment.trainer_logprobs?.[at], difference: segment.differences?.[at] ?? null });
    }
  }
  return out;
}

function plainToken(id, extra = "") {
  const words = report.vocabularies[0];
  const isControl = Boolean(words) && controlIds(0).has(id);
  return element("span", { class: `token sampled${isControl ? " control" : ""}${words ? "" : " bare"}${extra}`, title: `id ${id}` },
    visible(words ? words.texts[id] ?? String(id) : String(id), isControl));
}

// The row's ids above the expected ids, from before the first difference.
function sideBySide(tokens, piece, limit = 48) {
  const found = tokens.map((token) => token.id), expected = piece.expected_ids;
  let apart = 0;
  while (apart < found.length && apart < expected.length && found[apart] === expected[apart]) apart += 1;
  const first = Math.max(0, apart - 6);
  const strip = (ids, other) => element("div", { class: "tokens" },
    first ? "\u2026 " : null,
    ids.slice(first, first + limit).map((id, at) => plainToken(id, other[first + at] === id ? "" : " apart")),
    ids.length > first + limit ? ` \u2026 ${ids.length - first - limit} more` : null);
  return element("div", { class: "pair" },
    element("span", {}, "in the row"), strip(found, expected),
    element("span", {}, "expected"), strip(expected, found),
    element("span", {}, "first"), element("span", {}, apart < Math.max(found.length, expected.length)
      ? `token ${piece.begin + apart}: id ${found[apart] ?? "none"}, expected ${expected[apart] ?? "none"}` : "the ids are equal"));
}

// In the row's own view, above its tokens.
function evidenceCard(t, piece) {
  const tokens = tokensBetween(t, piece.begin, piece.end);
  return element("div", { class: "proof" }, element("p", {}, element("b", {}, piece.check), ` ${places(piece)}: ${piece.note}`),
    piece.expected_ids.length ? sideBySide(tokens, piece) : null);
}
