"""A Gradio app whose state is in this process's memory: a running total, a file's history, a slow count.

    homing run examples.gradio_ledger:app --workers 4 --preset gradio

Gradio keeps what `gr.State` holds, the queue and the streams of results by the page's `session_hash`; the stream of
results is a request of its own, and so is every click. All of them must reach the process where the page's state is.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI

MOUNT = os.environ.get("LEDGER_PATH", "/")


def add(amount: float, total: float) -> tuple[dict[str, float], float]:
    total += amount
    return {"total": total, "pid": os.getpid()}, total


def shout(path: str, files: list[str]) -> tuple[str, dict[str, Any], list[str]]:
    """The uploaded file in capitals, to download, and the names of all files that this page has sent."""
    files = [*files, Path(path).name]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as loud:
        loud.write(Path(path).read_text().upper())
    return loud.name, {"files": files, "pid": os.getpid()}, files


def count(up_to: float, total: float) -> Iterator[tuple[dict[str, float], float]]:
    """Add one, so often, and show each step."""
    for _ in range(int(up_to)):
        total += 1
        yield {"total": total, "pid": os.getpid()}, total


with gr.Blocks(title="Ledger", analytics_enabled=False) as demo:
    total, files = gr.State(0.0), gr.State([])
    with gr.Row():
        amount = gr.Number(label="Amount")
        shown = gr.JSON(label="Total")
    gr.Button("Add").click(add, [amount, total], [shown, total], api_name="add")
    gr.Button("Count").click(count, [amount, total], [shown, total], api_name="count")
    with gr.Row():
        quiet = gr.File(label="A text file")
        loud = gr.File(label="In capitals")
        sent = gr.JSON(label="Sent so far")
    gr.Button("Shout").click(shout, [quiet, files], [loud, sent, files], api_name="shout")

# Else each process draws one, and a page's run history is filed under as many.
demo.app_id = 20_26
app = gr.mount_gradio_app(FastAPI(), demo, path=MOUNT)
