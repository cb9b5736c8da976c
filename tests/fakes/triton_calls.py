"""A program of a user of tritonclient: calls models, and writes to its output what it was told.

It runs in a process of its own: the package's messages have the names of ours, and protobuf takes
each name once.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

_HEADERS = {"authorization": "Bearer tw_theirs"}
_TYPES = {"BYTES": object, "UINT8": np.uint8, "INT32": np.int32, "INT64": np.int64, "BOOL": bool}


class Triton:
    """Calls over one of the two protocols, with a token."""

    def __init__(self, kind: str, address: str) -> None:
        self.package: Any
        if kind == "http":
            import tritonclient.http as package
        else:
            import tritonclient.grpc as package
        self.package = package
        self.client = package.InferenceServerClient(address)

    def sent(self, name: str, values: Any, datatype: str) -> Any:
        array = np.array(values, dtype=_TYPES[datatype])
        found = self.package.InferInput(name, array.shape, datatype)
        found.set_data_from_numpy(array)
        return found

    def infer(self, model: str, *inputs: Any, outputs: tuple[str, ...] = (), **options: Any) -> Any:
        asked = [self.package.InferRequestedOutput(name) for name in outputs] or None
        options = {"headers": _HEADERS, **options}
        return self.client.infer(model, list(inputs), outputs=asked, **options)

    def told(self, method: str, *arguments: str) -> Any:
        found = getattr(self.client, method)(*arguments, headers=_HEADERS)
        if isinstance(found, dict | list):
            return found
        return MessageToDict(found, preserving_proto_field_name=True)

    def failure(self, *arguments: Any, **options: Any) -> tuple[str, str]:
        try:
            self.infer(*arguments, **options)
        except InferenceServerException as error:
            return error.status(), error.message()
        return "", ""


def calls(kind: str, address: str) -> dict[str, Any]:
    """Call models of every kind."""
    triton = Triton(kind, address)
    client, sent, infer = triton.client, triton.sent, triton.infer
    words = sent("text", [b"ab c", b"d"], "BYTES")
    pixels = sent("image", np.zeros((1, 4, 4, 1)), "UINT8")
    whole = infer(
        "dates", words, request_id="7", parameters={"max_new_tokens": 9, "temperature": 0.5}
    )
    of_llm = infer(
        "dates",
        sent("text_input", [[b"ab c"]], "BYTES"),
        sent("max_tokens", [9], "INT32"),
        sent("stream", [False], "BOOL"),
    )
    response = whole.get_response()
    config = triton.told("get_model_config", "dates")
    index = triton.told("get_model_repository_index")
    found: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": [client.is_server_ready(), client.is_model_ready("dates")],
        "unknown": client.is_model_ready("x"),
        "server": triton.told("get_server_metadata")["name"],
        "inputs": [one["name"] for one in triton.told("get_model_metadata", "tags")["inputs"]],
        "decoupled": config.get("config", config)["model_transaction_policy"]["decoupled"],
        "index": [one["name"] for one in (index if kind == "http" else index["models"])],
        "id": response["id"] if kind == "http" else response.id,
        "text": _texts(whole, "text"),
        "num_tokens": whole.as_numpy("num_tokens").tolist(),
        "text_output": _texts(of_llm, "text_output"),
        "of ids": _texts(infer("dates", sent("input_ids", [[4, 5]], "INT64")), "text"),
        "labels": _texts(infer("tags", words), "label"),
        "vectors": infer("tags", words, outputs=("embedding",)).as_numpy("embedding").tolist(),
        "class": _texts(infer("eyes", pixels, parameters={"top": 1}), "label"),
        "failures": [
            triton.failure("x", words),
            triton.failure("dates", words, parameters={"best": 1}),
            triton.failure("dates", words, parameters={"seed": -1}),
            triton.failure("dates", words, headers={"authorization": "Bearer tw_nobody"}),
            triton.failure("dates", sent("text", [b"a" * 5000], "BYTES")),
        ],
    }
    (dates,) = triton.told("get_inference_statistics", "dates")["model_stats"]
    outcomes = dates["inference_stats"]
    return found | {
        "models with statistics": len(triton.told("get_inference_statistics")["model_stats"]),
        "has been asked": int(dates["last_inference"]) > 0 and int(outcomes["success"]["ns"]) > 0,
        "outcomes": [int(outcomes[name]["count"]) for name in ("success", "fail")],
    }


def stream(kind: str, address: str) -> list[dict[str, Any]]:
    """Stream a generation, an embedding and one that fails; return what came by the id of each."""
    triton = Triton(kind, address)
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    triton.client.start_stream(lambda result, error: came.put((result, error)), headers=_HEADERS)
    words = triton.sent("text_input", [b"ab c"], "BYTES")
    send = triton.client.async_stream_infer
    send("dates", [words], request_id="1", enable_empty_final_response=True)
    send("tags", [triton.sent("text", [b"a"], "BYTES")], request_id="2")
    send("x", [words], request_id="3")
    triton.client.stop_stream()  # waits for the answers
    found = []
    while not came.empty():
        result, error = came.get()
        if error is not None:
            found.append({"error": error.message()})
            continue
        response = result.get_response()
        found.append(
            {
                "id": response.id,
                "outputs": [one.name for one in response.outputs],
                "text": _texts(result, "text_output") if response.id == "1" else [],
                "final": response.parameters["triton_final_response"].bool_param,
            }
        )
    return found


def _texts(answer: Any, name: str) -> list[str]:
    return [one.decode() for one in answer.as_numpy(name).reshape(-1)]


if __name__ == "__main__":
    what, kind, address = sys.argv[1:]
    print(json.dumps({"calls": calls, "stream": stream}[what](kind, address)))
