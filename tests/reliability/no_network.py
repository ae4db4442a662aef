"""The demo in its short form, and the commands on a small data set, in a process that may not reach the network.

    python tests/reliability/no_network.py DIR

An audit hook stops every look-up and every connection over IPv4 and IPv6, and notes each class that is unpickled. The
last line is JSON: what was tried.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import measuring  # noqa: F401 (the path to the other test modules)

LOOK_UPS = (
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.gethostbyaddr",
    "socket.getnameinfo",
)
REACHES = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind")
LOOPBACK = ("::1", "127.0.0.1")
tried: list[str] = []
unpickled: list[str] = []


def hook(event: str, arguments: tuple) -> None:
    if event == "pickle.find_class":
        unpickled.append(".".join(map(str, arguments[:2])))
    outside = event in REACHES and arguments[0].family.name in ("AF_INET", "AF_INET6")
    if event == "socket.bind" and arguments[1][0] in LOOPBACK:
        outside = False  # urllib3 looks in this way, when it is imported, whether there is IPv6
    if event in LOOK_UPS or outside:
        tried.append(event)
        raise OSError(f"{event} in a process without a network")


def main() -> None:
    out = Path(sys.argv[1])
    sys.addaudithook(hook)

    import usfan
    from small_runs import adapt_tiny, class_folder, train_tiny
    from small_runs import usfan as command
    from usfan.config import RuntimeConfig
    from usfan.engine.runtime import start_runtime
    from usfan.study.digits import run_demo

    # two of its methods: all of them learn from the same tensors
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    run_demo(out / "demo", runtime=runtime, quick=True, methods=["shot-im", "u-sfan"])
    data = class_folder(out / "data")
    source = train_tiny(data, out / "source")
    adapted = adapt_tiny(source, data, out / "adapted")
    small = ("--device", "cpu", "--workers", 0)
    codes = [
        command("posterior", source, data, "--out", out / "posterior", *small),
        command("evaluate", adapted, data, *small),
        command("predict", adapted, data, "--out", out / "predictions.csv", *small),
        command("report", adapted),
    ]
    asked_by_us = list(tried)
    refused = ""
    try:
        usfan.SourceModel.load(
            "nobody/nothing"
        )  # a Hub id: the one thing here that asks for the network
    except usfan.ArtifactError as error:
        refused = str(error)
    print(
        json.dumps(
            {
                "codes": codes,
                "tried": asked_by_us,
                "hub": sorted(set(tried)),
                "refused": refused,
                "unpickled": sorted(set(unpickled)),
            }
        )
    )


if __name__ == "__main__":
    main()
