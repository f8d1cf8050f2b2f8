"""SQL statements of the journal, as plain text: they run for every operation, and SQLite caches them prepared.

Statements for client requests contain the tenant; the others are for queues that the runtime knows.
"""

from typing import Final

FENCE: Final = "SELECT epoch FROM lease"
TOUCH_MODEL: Final = "UPDATE models SET last_request = ? WHERE id = ? AND tenant = ? RETURNING snapshot_number"
NEXT_NUMBER: Final = """
    SELECT max(coalesce((SELECT max(number) FROM operations WHERE lane = :lane), -1),
               coalesce((SELECT snapshot_number FROM models WHERE id = :lane), -1)) + 1
"""
INSERT: Final = """
    INSERT INTO operations (request, tenant, lane, number, kind, tokens, digest, status, attempts, error, category,
                            epoch, payload, dropped, created, finished)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, 0, ?, ?)
    ON CONFLICT (lane, number) DO NOTHING RETURNING id
"""
COLUMNS: Final = "id, request, tenant, lane, number, kind, tokens, status, attempts"
BY_NUMBER: Final = f"SELECT {COLUMNS}, digest FROM operations WHERE lane = ? AND number = ? AND tenant = ?"
PENDING: Final = f"SELECT {COLUMNS} FROM operations WHERE status = 'pending' ORDER BY lane, number"
AFTER: Final = f"SELECT {COLUMNS} FROM operations WHERE lane = ? AND number > ? ORDER BY number"

PUT_PAYLOAD: Final = "INSERT INTO payloads (operation, data) VALUES (?, ?)"
GET_PAYLOAD: Final = """
    SELECT operations.payload, payloads.data FROM operations LEFT JOIN payloads ON payloads.operation = operations.id
    WHERE operations.id = ?
"""
PUT_COMPOSITION: Final = "INSERT INTO compositions (operation, data) VALUES (?, ?)"
GET_COMPOSITION: Final = "SELECT data FROM compositions WHERE operation = ?"
DROP_COMPOSITION: Final = "DELETE FROM compositions WHERE operation = ?"
DROP_PAYLOAD: Final = "DELETE FROM payloads WHERE operation = ?"
PUT_RESULT: Final = "INSERT INTO results (operation, data) VALUES (?, ?)"

FINISH: Final = """
    UPDATE operations SET status = ?, error = ?, category = ?, result = ?, epoch = ?, finished = ?
    WHERE id = ? AND status = 'pending' RETURNING kind, payload, lane, tenant, number
"""
PUT_FIGURES: Final = """
    INSERT INTO figures (operation, tenant, run, number, kind, time, data) VALUES (?, ?, ?, ?, ?, ?, ?)
"""
CREATION_FAILED: Final = (
    "UPDATE models SET status = 'gone', reason = ? WHERE id = ? AND tenant = ? AND status = 'creating'"
)
FORGET_PAYLOAD: Final = "UPDATE operations SET payload = NULL WHERE id = ?"
OUTCOME: Final = """
    SELECT operations.status, operations.error, operations.category, results.data
    FROM operations LEFT JOIN results ON results.operation = operations.id WHERE operations.id = ?
"""
FUTURE: Final = """
    SELECT operations.id, operations.kind, operations.status, operations.lane, operations.error, operations.category,
           operations.dropped, operations.result, results.data
    FROM operations LEFT JOIN results ON results.operation = operations.id
    WHERE operations.request = ? AND operations.tenant = ?
"""
BLAME: Final = "UPDATE operations SET attempts = attempts + 1, epoch = ? WHERE id = ? AND status = 'pending'"

SNAPSHOT: Final = """
    SELECT snapshot_number, snapshot_folder, snapshot_digest, snapshot_size, status FROM models WHERE id = ?
"""
SET_SNAPSHOT: Final = """
    UPDATE models SET snapshot_number = ?, snapshot_folder = ?, snapshot_digest = ?, snapshot_size = ?, snapshot_at = ?
    WHERE id = ?
"""
COVERED: Final = """
    SELECT id, payload FROM operations
    WHERE lane = ? AND number <= ? AND status <> 'pending' AND payload IS NOT NULL
"""

MARK_READ: Final = "UPDATE operations SET read = ? WHERE id = ? AND read IS NULL"
_not_recorded: Final = """
    NOT EXISTS (SELECT 1 FROM recorded WHERE recorded.lane = operations.lane AND recorded.number = operations.number)
"""
UNREAD: Final = f"""
    SELECT id, result FROM operations INDEXED BY operations_kept
    WHERE finished < ? AND dropped = 0 AND {_not_recorded} LIMIT ?
"""
READ: Final = f"SELECT id, result FROM operations WHERE read < ? AND dropped = 0 AND {_not_recorded} LIMIT ?"
OLD_RECORDED: Final = """
    DELETE FROM recorded WHERE rowid IN (SELECT rowid FROM recorded WHERE used < ? LIMIT ?)
"""
DROP_RESULT: Final = "DELETE FROM results WHERE operation = ?"
FORGET_RESULT: Final = """
    UPDATE operations SET result = NULL, error = substr(error, 1, 300), dropped = 1 WHERE id = ?
"""
OVER: Final = """
    SELECT operations.id, operations.payload FROM operations JOIN models ON models.id = operations.lane
    WHERE models.status = 'gone' AND operations.payload IS NOT NULL
    AND operations.status <> 'pending' LIMIT ?
"""
OLD: Final = """
    DELETE FROM operations WHERE id IN (
        SELECT operations.id FROM operations LEFT JOIN models ON models.id = operations.lane
        WHERE operations.finished < ? AND operations.dropped = 1 AND operations.payload IS NULL
        AND (models.id IS NULL OR models.status = 'gone'
             OR operations.number <= models.snapshot_number)
        LIMIT ?
    )
"""
OLD_CHECKPOINTS: Final = """
    DELETE FROM checkpoints WHERE id IN (
        SELECT id FROM checkpoints WHERE deleted < ? AND folder NOT IN (SELECT folder FROM folders) LIMIT ?
    )
"""
OLD_SAMPLERS: Final = "DELETE FROM samplers WHERE id IN (SELECT id FROM samplers WHERE ended < ? LIMIT ?)"
ROWS: Final = "SELECT (SELECT min(id) FROM operations), (SELECT max(id) FROM operations)"
PAYLOAD_FILES: Final = "SELECT payload FROM operations NOT INDEXED WHERE id BETWEEN ? AND ? AND payload > ''"
RESULT_FILES: Final = "SELECT result FROM operations NOT INDEXED WHERE id BETWEEN ? AND ? AND result > ''"
FOLDERS: Final = """
    SELECT folder FROM checkpoints WHERE deleted IS NULL
    UNION SELECT folder FROM samplers WHERE folder IS NOT NULL AND ended IS NULL
    UNION SELECT snapshot_folder FROM models WHERE snapshot_folder IS NOT NULL
"""
SOURCES: Final = """
    SELECT operations.kind, payloads.data FROM operations JOIN payloads ON payloads.operation = operations.id
    WHERE operations.payload = '' AND (operations.kind IN ('create', 'load')
          OR operations.status = 'pending' AND operations.kind IN ('sample', 'save'))
"""
