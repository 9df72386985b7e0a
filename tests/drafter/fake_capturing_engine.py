"""A FAKE capturing engine, for the client's tests alone: it answers /generate and writes made-up tensors to the spool.

The first token id of a request chooses a fault: REFUSED (400), SILENT (no tensors), OTHER_IDS, NAN, DEAD (the
connection breaks), SLOW (`slow` seconds).
"""

from __future__ import annotations

import asyncio
import os
import platform
from pathlib import Path

import numpy as np
from aiohttp import web

from drafter.data.spool import Handshake, part_file, spool_of, write_handshake
from drafter.data.tensorfile import write_tensors
from tests.app_thread import AppThread, cut
from tests.drafter.capturing import LAYERS, N_AUX, WIDTH, hidden

KEY = "engine-key"
REFUSED, SILENT, OTHER_IDS, NAN, DEAD, SLOW = 1001, 1002, 1003, 1004, 1005, 1006


class FakeCapturingEngine(AppThread):
    """chunk: rows of one part. delay: seconds before an answer."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self.target = folder, target
        self.chunk, self.overlap, self.delay, self.slow = 1000, 0, 0.0, 0.5
        self.answered: list[str] = []
        self.running = self.most_running = 0

    def start(self) -> FakeCapturingEngine:
        spool_of(self.folder).mkdir(parents=True)
        self.shake_hands()
        return super().start()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/model_info", self._info)
        app.router.add_post("/generate", self._generate)
        return app

    def shake_hands(self, **changes: object) -> None:
        inputs_to = [layer + 1 for layer in LAYERS]
        kind = {"format": 1, "host": platform.node(), "pid": os.getpid(), "sglang": "0.0.fake", "layer_ids": LAYERS}
        kind |= {"inputs_to": inputs_to, "convention": "output_of_layer", "hidden_size": WIDTH, "dtype": "float32"}
        kind |= {"tp_rank": 0, **changes}
        write_handshake(self.folder, Handshake(**kind))

    async def _info(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"served_model_name": "fake", "model_path": str(self.target)})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["sampling_params"] == {"max_new_tokens": 1, "temperature": 0}
        ids = np.array(body["input_ids"], np.int32)
        fault = int(ids[0])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.slow if fault == SLOW else self.delay * (1 + len(self.answered) % 3))
            if fault == DEAD:
                cut(request)
                return web.Response()
            if fault == REFUSED:
                return web.json_response({"error": {"message": "The input is too long."}}, status=400)
            if fault != SILENT:
                self.write(body["rid"], ids, fault)
        finally:
            self.running -= 1
        self.answered.append(body["rid"])
        return web.json_response({"text": "x", "meta_info": {}})

    def write(self, rid: str, ids: np.ndarray, fault: int = 0, at: int = 0) -> None:
        """Write the rows of `ids`, of which the first is row `at` of the request."""
        for start in range(0, len(ids), self.chunk):
            start = max(0, start - self.overlap)
            part = ids[start : start + self.chunk + self.overlap]
            aux, final = hidden(part, N_AUX * WIDTH, at + start), hidden(part, WIDTH, at + start)
            if fault == NAN:
                aux[-1] = np.nan
            shown = part + 1 if fault == OTHER_IDS else part
            tensors = {"input_ids": shown, "aux_hidden": aux, "final_hidden": final}
            write_tensors(part_file(self.folder, rid, at + start), tensors)
