"""The Python client of a Tokenweir server, for threads (Client) and for asyncio (AsyncClient).

    with Client("127.0.0.1:50051") as client:
        print(client.generate("dates", "3rd of Feb, 1998").text)
        with client.stream("dates", "3rd of Feb, 1998") as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
        print(pieces.result.finish_reason)
        best = client.generate("dates", "3rd of Feb, 1998", beam=4, num_outputs=2).sequences
        print(client.score("dates", "3rd of Feb, 1998", best[1].text).sum_logprob)

A model that was trained with conversations takes one for a prompt:

        said = [{"role": "user", "content": "What is a weir?"}]
        print(client.generate("assistant", said).text)

Without a server, `tokenweir.load` runs a package in this process, and returns the same client:

    with tokenweir.load("packages/dates") as client:
        print(client.generate("dates", "3rd of Feb, 1998").text)

Every call has a deadline (60 s unless told otherwise) and is retried, while nothing of an answer
has come, if the server is unavailable or full; the server's push-back says how long to wait.
A call raises:

    TokenweirClientError      any other status
    ├── InvalidArgument       `violations` names every wrong field
    ├── Unauthenticated       the server asks for a token
    ├── PermissionDenied      the token is not for that
    ├── NotFound
    ├── ResourceExhausted     `retry_after` seconds
    ├── DeadlineExceeded
    ├── Unavailable           `retry_after` seconds, or None if nobody answers
    ├── NotSupported
    ├── Aborted
    ├── Cancelled
    └── Internal
        └── BrokenStream

and TypeError or ValueError for arguments that cannot be sent at all; ValueError for a call of a
client that is closed. A call that runs when it is closed ends with Cancelled.

`channel` puts another one in the place of a channel to an address, for tests or for interceptors:
`Client(channel=grpc.intercept_channel(...))`; `credentials` are those of gRPC, `token` is what a
server may ask for, and `metadata` goes with every call too:

    roots = grpc.ssl_channel_credentials(Path("ca.pem").read_bytes())
    client = Client("server.example:50051", credentials=roots, token="tw_...")
"""

from __future__ import annotations

from tokenweir._errors import (
    Aborted,
    BrokenStream,
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    Internal,
    InvalidArgument,
    NotFound,
    NotSupported,
    PermissionDenied,
    ResourceExhausted,
    TokenweirClientError,
    Unauthenticated,
    Unavailable,
)
from tokenweir._local import LocalClient, load
from tokenweir._options import (
    Aggregation,
    CallOptions,
    Chat,
    GenerateOptions,
    Item,
    Message,
    PredictOptions,
    Prompt,
    ScoreOptions,
    StreamOptions,
    Truncate,
)
from tokenweir._streams import (
    AsyncTextStream,
    TextStream,
)
from tokenweir._types import (
    Answers,
    Classification,
    Embedding,
    GeneratedSequence,
    Generation,
    Generations,
    LabelledSpan,
    Labelling,
    ModelInfo,
    ModelLimits,
    ParityAnswers,
    ParityCertificate,
    ParityLoss,
    PositionLogprobs,
    Provenance,
    ReplicaInfo,
    ReplicaLoad,
    Result,
    Score,
    ScoredLabel,
    ServerInfo,
    TargetScore,
    TextQuality,
    Timing,
    TokenLogprob,
    Usage,
    VersionTraffic,
    WastedWork,
)
from tokenweir.client import (
    AsyncClient,
    Client,
)

__all__ = [
    "Aborted",
    "Aggregation",
    "Answers",
    "AsyncClient",
    "AsyncTextStream",
    "BrokenStream",
    "CallOptions",
    "Cancelled",
    "Chat",
    "Classification",
    "Client",
    "DeadlineExceeded",
    "Embedding",
    "FieldViolation",
    "GenerateOptions",
    "GeneratedSequence",
    "Generation",
    "Generations",
    "Internal",
    "InvalidArgument",
    "Item",
    "LabelledSpan",
    "Labelling",
    "LocalClient",
    "Message",
    "ModelInfo",
    "ModelLimits",
    "NotFound",
    "NotSupported",
    "ParityAnswers",
    "ParityCertificate",
    "ParityLoss",
    "PermissionDenied",
    "PositionLogprobs",
    "PredictOptions",
    "Prompt",
    "Provenance",
    "ReplicaInfo",
    "ReplicaLoad",
    "ResourceExhausted",
    "Result",
    "Score",
    "ScoreOptions",
    "ScoredLabel",
    "ServerInfo",
    "StreamOptions",
    "TargetScore",
    "TextQuality",
    "TextStream",
    "Timing",
    "TokenLogprob",
    "TokenweirClientError",
    "Truncate",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "VersionTraffic",
    "WastedWork",
    "load",
]
