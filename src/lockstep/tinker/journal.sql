CREATE TABLE IF NOT EXISTS requests (
    target TEXT NOT NULL,     -- model, sampler or session, within which seq_id counts
    seq_id INTEGER NOT NULL,
    session TEXT NOT NULL,
    kind TEXT NOT NULL,
    digest BLOB NOT NULL,     -- of the payload
    body BLOB,                -- NULL once nothing needs it any more
    state TEXT NOT NULL,
    result BLOB,              -- protobuf, JSON, or the text of the error
    category TEXT,            -- of a failed one; the HTTP status of a refused one
    UNIQUE (target, seq_id)
);
CREATE TABLE IF NOT EXISTS drawn (  -- replies of a request, one after the other
    target TEXT NOT NULL, seq_id INTEGER NOT NULL, time REAL NOT NULL,
    prompt BLOB, lengths BLOB, ids BLOB, logprobs BLOB, versions BLOB,
    UNIQUE (target, seq_id)
);
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL, id TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, id)
) WITHOUT ROWID;
