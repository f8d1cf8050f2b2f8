"""Messages between the API process and the engine process: a JSON head, and bytes beside it, over one socket.

A frame is two little-endian uint32 (bytes of the head, bytes of the body), the head, the body.
"""

import struct
from dataclasses import dataclass, field
from typing import Any

import orjson

SIZES = struct.Struct("<II")

# to the engine                           head beside "type"                                         body
RUN = "run"  #                            id, queue, number, kind, tenant, tokens, alone, replay      the payload
#                                         composition: of a replay, as the first DONE had it
RESTORE = "restore"  #                    queue, folder (None: from nothing)                          -
DETACH = "detach"  #                      queue: snapshot it, then free its memory                    -
CANCEL = "cancel"  #                      id of a sample; what trains runs to its end                -
SNAPSHOT = "snapshot"  #                  queue                                                       -
DRAIN = "drain"  #                        end the pass that runs, snapshot what changed, then DRAINED -
# from the engine
READY = "ready"  #                        info: fields of ModelInfo                                  -
BEGIN = "begin"  #                        ids of the operations that are now under way               -
DONE = "done"  #                          id, error, category, extra (what a checkpoint's row says)  the result
#                                         cancelled: True where a CANCEL came in time
#                                         composition: JSON text, how its passes were composed
#                                         later: True where a replay may work when there is memory again
RESTORED = "restored"  #                  queue, error (None: it is there; otherwise why not), later  -
SNAPSHOTTED = "snapshotted"  #            queue, number, folder, digest, size                         -
DETACHED = "detached"  #                  queue                                                       -
DRAINED = "drained"  #                    -
ALIVE = "alive"  #                        -: the process runs; sent every second by a thread of its own
PASSED = "passed"  #                      kind, seconds, tokens, padded, tenants, operations, flops  -


@dataclass(slots=True)
class Message:
    """One message.

    Attributes:
        type: one of the names of this module.
        head: what JSON can say.
        body: bytes that go as they are.
    """

    type: str
    head: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def pack_head(self) -> bytes:
        """Return the frame without its body, for bodies that are too large to be copied."""
        head = orjson.dumps({"type": self.type, **self.head})
        return SIZES.pack(len(head), len(self.body)) + head

    def pack(self) -> bytes:
        """Return the frame."""
        return self.pack_head() + self.body

    @classmethod
    def unpack(cls, head: bytes, body: bytes) -> "Message":
        """Read a frame's parts."""
        fields = orjson.loads(head)
        return cls(fields.pop("type"), fields, body)
