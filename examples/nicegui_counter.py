"""A NiceGUI page whose elements live in this process's memory.

    export STORAGE_SECRET=…
    homing run examples.nicegui_counter:app --workers 4 --preset engineio \\
        --session signed-cookie:session:id --secret-env STORAGE_SECRET

A page is built in the process that answered its GET; its events come over Socket.IO and must reach the same one. The
cookie that NiceGUI signs with the storage secret brings them together, whatever the browser opens next.
"""

import os

from fastapi import FastAPI
from nicegui import ui

app = FastAPI()


@ui.page("/")
def page() -> None:
    clicks = {"count": 0}
    label = ui.label(f"0 clicks at {os.getpid()}")

    def click() -> None:
        clicks["count"] += 1
        label.set_text(f"{clicks['count']} clicks at {os.getpid()}")

    ui.button("Click", on_click=click)


ui.run_with(app, storage_secret=os.environ["STORAGE_SECRET"], show_welcome_message=False)
