"""Real Chromium: what a session may reach, and that nothing of one session reaches another."""

from __future__ import annotations

import asyncio
import base64
import hashlib

import pytest
from tests.support.chromium import Answer, ChromiumWorld, Site, play, require_chromium

from homing.rundir import SESSION_SOCKET_DIR_ENV
from homing.web.chromium.gateway import Gateway
from homing.web.chromium.rules import NavigationRules
from homing.web.processes import command_line

KEEPS = """<p id=p>…</p><a href=/file>File</a> <a href=/second target=_blank>Tab</a><script>
(async () => {
  const had = [];
  if (document.cookie.includes('mine')) had.push('cookie');
  if (localStorage.mine) had.push('localStorage');
  if (sessionStorage.mine) had.push('sessionStorage');
  if ((await caches.keys()).length) had.push('cache storage');
  if ((await indexedDB.databases()).length) had.push('indexedDB');
  for await (const name of (await navigator.storage.getDirectory()).keys()) had.push('file ' + name);
  if ((await navigator.serviceWorker?.getRegistrations() ?? []).length) had.push('service worker');
  for (const name of ['geolocation', 'notifications', 'clipboard-read']) {
    try { if ((await navigator.permissions.query({ name })).state === 'granted') had.push(name) } catch { }
  }
  if (window.name) had.push('window name');
  if (window.planted) had.push('script of another page');
  if (visualViewport.scale !== 1) had.push('zoom');
  // Kept for ever: who has it without asking has it from a cache.
  for (let i = 0; i < 2; i++) await (await fetch('/kept')).text();
  document.cookie = 'mine=1; max-age=9999';
  localStorage.mine = sessionStorage.mine = '1';
  window.name = 'mine';
  await caches.open('mine');
  await new Promise((done) => { const open = indexedDB.open('mine'); open.onsuccess = done; open.onerror = done });
  await (await navigator.storage.getDirectory()).getFileHandle('mine', { create: true });
  try { await navigator.serviceWorker.register('/worker.js') } catch { }
  p.textContent = 'had: ' + (had.join(', ') || 'nothing');
})();
</script>"""


def test_nothing_of_one_session_is_seen_by_another() -> None:
    """In one browser, whose contexts are made ready beforehand; half of the sessions end before the next one begins."""

    async def kept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncache-control: max-age=99999, immutable\r\n"
        writer.write(head + b"content-length: 4\r\nconnection: close\r\n\r\nkept")

    async def file(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-disposition: attachment\r\n"
        writer.write(head + b"content-length: 4\r\nconnection: close\r\n\r\nmine")

    pages: dict[str, str | Answer] = {
        "/": KEEPS,
        "/worker.js": "self.onfetch = () => {}",
        "/second": "<h1>Second</h1>",
        "/kept": kept,
        "/file": file,
    }

    async def script(world: ChromiumWorld) -> None:
        contexts = []
        await world.seed("first", "/second")
        while not world.provider._warm:
            await asyncio.sleep(0.02)
        for number in range(4):
            session = f"s{number}"
            ready = [each.context for each in world.provider._warm]
            await world.seed(session, "/")
            context = world.held(session).context
            contexts.append(context.raw)
            assert context in ready  # not made for this session
            result = await world.step(session, {"action": "wait_for", "text": "had: nothing"})
            assert result.execution_ok, result.observation.axtree
            assert "x-planted" not in world.site.headers["/kept"]
            assert result.observation.downloads == ()
            assert [tab.url for tab in result.observation.tabs] == [world.url("/")]
            assert world.site.asked.count("/kept") == number + 1  # twice asked for, once from its own cache
            await leave_everything(world, session)
            if number % 2:
                assert await world.manager.close_session(session)
            while not world.provider._warm:
                await asyncio.sleep(0.02)
        assert len({id(raw) for raw in contexts}) == 4
        assert world.provider.launched == 1
        for session in ("s0", "s2"):
            seen = await world.manager.observe(session)
            assert [tab.url for tab in seen.tabs] == [world.url("/"), world.url("/second")]
            assert len(seen.downloads) == 1

    async def leave_everything(world: ChromiumWorld, session: str) -> None:
        """What a page cannot leave by itself."""
        raw = world.held(session).context.raw
        page = raw.pages[0]
        await raw.grant_permissions(["geolocation", "notifications", "clipboard-read"])
        assert (
            await page.evaluate("navigator.permissions.query({name: 'geolocation'}).then((it) => it.state)")
            == "granted"
        )
        await raw.set_extra_http_headers({"x-planted": "1"})
        await raw.add_init_script("window.planted = 1")
        await (await raw.new_cdp_session(page)).send("Emulation.setPageScaleFactor", {"pageScaleFactor": 2})
        await world.step(session, {"action": "keyboard_press", "key": "Control+c"})
        await world.click(session, "File")
        while not (seen := await world.manager.observe(session)).downloads or seen.downloads[0].status == "started":
            await asyncio.sleep(0.02)
        await world.click(session, "Tab")
        assert (await world.step(session, {"action": "wait_for", "text": "Second"})).execution_ok

    play(pages, script, local={"warm": 2})


def test_a_reset_session_has_none_of_the_cookies_of_the_try_before() -> None:
    pages = {
        "/": "<p id=p></p><script>p.textContent = 'cookie: ' + document.cookie; document.cookie = 'mine=1'</script>"
    }

    async def script(world: ChromiumWorld) -> None:
        seen = await world.seed("s", "/")
        assert '"cookie:"' in seen.axtree
        task = (await world.manager.session_status("s")).task_id
        from homing.web.models import Task

        seen = (await world.manager.reset_session("s", Task(benchmark="pages", task_id=task))).observation
        assert '"cookie:"' in seen.axtree

    play(pages, script)


def test_what_one_session_copies_another_does_not_paste() -> None:
    pages = {"/": "<textarea aria-label=Field>secret</textarea>"}

    async def script(world: ChromiumWorld) -> None:
        from tests.support.chromium import ref_of

        seen = await world.seed("a", "/")
        await world.step("a", {"action": "focus", "ref": ref_of(seen, "Field")})
        await world.step("a", {"action": "keyboard_press", "key": "Control+a"})
        await world.step("a", {"action": "keyboard_press", "key": "Control+c"})
        seen = await world.seed("b", "/")
        field = ref_of(seen, "Field")
        await world.step("b", {"action": "clear", "ref": field})
        for key in ("Control+v", "Shift+Insert", "Control+Shift+v"):
            result = await world.step("b", {"action": "press", "ref": field, "key": key})
        assert "secret" not in result.observation.axtree
        await world.step("a", {"action": "clear", "ref": ref_of(await world.manager.observe("a"), "Field")})
        result = await world.step("a", {"action": "keyboard_press", "key": "Control+v"})
        assert "secret" in result.observation.axtree

    play(pages, script)


ATTEMPTS = """<p id=p>…</p><script>
const canary = new URLSearchParams(location.search).get('at');
const port = canary.split(':')[1];
const soon = (act) => new Promise((done) => { act(done); setTimeout(done, 1500) });
const element = (tag, key, path, more = {}) => soon((done) => {
  const made = Object.assign(document.createElement(tag), { onload: done, onerror: done }, more);
  made[key] = `http://${canary}/${path}`;
  document.body.append(made);
});
const worker = (text, kind = Worker) => soon((done) => {
  const made = new kind(URL.createObjectURL(new Blob([text])));
  (made.port ?? made).onmessage = made.onerror = done;
});
const form = (method) => soon(() => {
  const frame = document.createElement('iframe');
  frame.name = 'of-' + method;
  const made = Object.assign(document.createElement('form'), { action: `http://${canary}/${method}`, method, target: frame.name });
  document.body.append(frame, made);
  made.submit();
});
const hosts = ['127.0.0.1', 'localhost', 'localhost.', 'a.localhost', '127.1', '2130706433', '0x7f000001', '0x7f.0.0.1', '0177.0.0.1',
  '017700000001', '127.0.0.2', '0.0.0.0', '0', '[::1]', '[::]', '[::ffff:127.0.0.1]', '[::ffff:7f00:1]', '[::127.0.0.1]',
  '127。0。0。1', '①②⑦.0.0.1'];
const tried = [
  ...hosts.map((host) => fetch(`http://${host}:${port}/host`, { mode: 'no-cors' })),
  fetch('/redirect?to=' + encodeURIComponent(`http://${canary}/redirected`), { mode: 'no-cors' }),
  soon((done) => { const made = new XMLHttpRequest(); made.onloadend = done; made.open('GET', `http://${canary}/xhr`); made.send() }),
  soon((done) => { const made = new WebSocket(`ws://${canary}/socket`); made.onopen = made.onerror = done }),
  soon((done) => { const made = new EventSource(`http://${canary}/events`); made.onopen = made.onerror = done }),
  soon(() => navigator.sendBeacon(`http://${canary}/beacon`)),
  element('img', 'src', 'image'), element('script', 'src', 'script'), element('iframe', 'src', 'frame'),
  element('embed', 'src', 'embed'), element('object', 'data', 'object'), element('video', 'src', 'video', { autoplay: true }),
  element('audio', 'src', 'audio', { autoplay: true }), element('link', 'href', 'style', { rel: 'stylesheet' }),
  element('link', 'href', 'prefetch', { rel: 'prefetch' }), element('link', 'href', 'preload', { rel: 'preload', as: 'image' }),
  element('link', 'href', 'preconnect', { rel: 'preconnect' }), element('link', 'href', 'icon', { rel: 'icon' }),
  element('link', 'href', 'modulepreload', { rel: 'modulepreload' }), element('link', 'href', 'manifest', { rel: 'manifest' }),
  soon(() => { document.body.style.background = `url(http://${canary}/css)` }),
  new FontFace('F', `url(http://${canary}/font)`).load(),
  import(`http://${canary}/import`),
  worker(`fetch('http://${canary}/worker', { mode: 'no-cors' }).finally(() => postMessage(1))`),
  worker(`try { importScripts('http://${canary}/imported') } finally { postMessage(1) }`),
  worker(`onconnect = (event) => fetch('http://${canary}/shared', { mode: 'no-cors' }).finally(() => event.ports[0].postMessage(1))`,
    SharedWorker),
  navigator.serviceWorker?.register('/worker.js?' + canary),
  form('get'), form('post'),
  element('iframe', 'dummy', '', { srcdoc: `<meta http-equiv=refresh content="0;url=http://${canary}/refresh">` }),
  element('a', 'href', 'download', { download: 'x' }).then(() => 0),
  soon(() => { const made = Object.assign(document.createElement('a'), { href: `http://${canary}/clicked`, download: 'x', target: '_blank' });
    document.body.append(made); made.click() }),
  soon(() => { const made = Object.assign(document.createElement('a'), { href: '#x', ping: `http://${canary}/ping` });
    document.body.append(made); made.click() }),
  soon(() => window.open(`http://${canary}/popup`)),
  soon(() => { const made = Object.assign(document.createElement('script'), { type: 'speculationrules', text: JSON.stringify({
    prerender: [{ source: 'list', urls: [`http://${canary}/prerender`] }], prefetch: [{ source: 'list', urls: [`http://${canary}/speculated`] }],
  }) }); document.head.append(made) }),
  soon((done) => {
    const made = new RTCPeerConnection({ iceServers: [{ urls: [`stun:${canary}`, `stun:localhost:${port}`] },
      { urls: `turn:${canary}?transport=tcp`, username: 'u', credential: 'c' }] });
    made.onicegatheringstatechange = () => made.iceGatheringState === 'complete' && done();
    made.createDataChannel('d');
    made.createOffer().then((offer) => made.setLocalDescription(offer));
  }),
  soon(async () => await new WebTransport(`https://${canary}/transport`).ready),
];
Promise.allSettled(tried).then(() => { p.textContent = 'tried ' + tried.length });
</script>"""


class Datagrams(asyncio.DatagramProtocol):
    """Counts what comes without a connection."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def datagram_received(self, data: bytes, addr: object) -> None:
        self.seen.append(data)


def test_a_page_reaches_no_port_of_this_machine_but_its_own() -> None:
    require_chromium()
    canary = Site({"/" + name: "<h1>canary</h1>" for name in ("", "frame", "goto")})

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to = canary.origin + "/redirected"
        writer.write(f"HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())

    def fetching(address: str) -> str:
        return f"onfetch = () => {{}}; oninstall = () => fetch('http://{address}/service', {{ mode: 'no-cors' }})"

    pages: dict[str, str | Answer] = {"/": ATTEMPTS, "/redirect": redirect, "/start": "<p>start</p>"}

    async def script(world: ChromiumWorld) -> None:
        await canary.start()
        at = canary.origin.removeprefix("http://")
        host, port = at.split(":")
        world.site.pages["/worker.js"] = fetching(at)
        transport, datagrams = await asyncio.get_running_loop().create_datagram_endpoint(
            Datagrams, local_addr=(host, int(port))
        )
        try:
            await world.seed("s", "/start")
            await world.step("s", {"action": "goto", "url": world.url(f"/?at={at}")})
            while True:  # windows that it opens come to the front
                result = await world.step("s", {"action": "tab_focus", "index": 0})
                if '"tried ' in result.observation.axtree:
                    break
                await asyncio.sleep(0.1)
            await world.seed("t", "/start")
            for url in (
                canary.origin + "/goto", "file:///etc/passwd", "chrome://version", "view-source:" + world.url("/"),
                "data:text/html,x", "javascript:1", f"http://localhost:{port}/", "http://169.254.169.254/",
                "about:config", "blob:" + world.url("/x"), "filesystem:" + world.url("/x"), "ftp://127.0.0.1/", "devtools://devtools/",
                f"http://localhost.:{port}/", f"http://0x7f.1:{port}/", f"http://[::1]:{port}/", f"http://[::ffff:7f00:1]:{port}/",
            ):  # fmt: skip
                result = await world.step("t", {"action": "goto", "url": url})
                assert not result.execution_ok, url
                assert result.observation.url.startswith(world.site.origin), url
            # A redirect is judged where it leads.
            result = await world.step("t", {"action": "goto", "url": world.url("/redirect")})
            assert "canary" not in result.observation.axtree
            assert canary.asked == []
            assert datagrams.seen == []
            gateway = world.provider.gateway
            assert gateway is not None
            assert gateway.refused >= 30
        finally:
            transport.close()
            await canary.aclose()

    play(pages, script)


def test_what_may_be_reached_is_reached_through_the_gateway() -> None:
    """Pages, posted bodies, chunked replies, images and web sockets of another host, with its cookies."""
    require_chromium()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await reader.readexactly(300_000)
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\n{len(body)}".encode())

    async def chunked(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in (b"one ", b"two ", b"three"):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def socket(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key = other.headers["/socket"].partition("ec-WebSocket-Key: ")[2].partition("\r\n")[0]
        digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
        accept = base64.b64encode(digest).decode()
        writer.write(
            "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
            f"sec-websocket-accept: {accept}\r\n\r\n".encode()
            + b"\x81\x05hello"
        )
        await writer.drain()
        await asyncio.sleep(5)

    page = """<p id=p>…</p><script>(async () => {
      const post = await (await fetch('/echo', { method: 'POST', body: 'x'.repeat(300000) })).text();
      const chunks = await (await fetch('/chunked')).text();
      const socket = new WebSocket(`ws://${location.host}/socket`);
      const said = await new Promise((done) => { socket.onmessage = (e) => done(e.data); socket.onerror = () => done('no') });
      p.textContent = ['got', post, chunks, said].join('|');
    })()</script>"""
    other = Site({"/": page, "/echo": echo, "/chunked": chunked, "/socket": socket})

    async def script(world: ChromiumWorld) -> None:
        await other.start()
        try:
            await world.seed("s", "/start")
            await world.step("s", {"action": "goto", "url": other.origin + "/"})
            result = await world.step("s", {"action": "wait_for", "text": "got|300000|one two three|hello"})
            assert result.execution_ok, result.observation.axtree
            gateway = world.provider.gateway
            assert gateway is not None
            assert gateway.carried >= 4
        finally:
            await other.aclose()

    play({"/start": "<p>start</p>"}, script, rules=NavigationRules(private=True))


def test_a_name_is_judged_by_the_addresses_it_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that changes its address after the judgement has no second look-up to change it for."""
    canary = Site({"/": "<h1>canary</h1>"})

    async def main() -> None:
        await canary.start()
        port = int(canary.origin.rpartition(":")[2])
        gateway = Gateway(NavigationRules())
        await gateway.start()
        loop = asyncio.get_running_loop()
        asked: list[str] = []

        async def resolve(host: str, port: int, **_: object) -> list[object]:
            asked.append(host)
            return [(2, 1, 6, "", ("127.0.0.1", port))]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        try:
            for head in (
                f"GET http://rebound.example:{port}/ HTTP/1.1\r\nhost: rebound.example\r\n\r\n",
                f"CONNECT rebound.example:{port} HTTP/1.1\r\nhost: rebound.example\r\n\r\n",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.address.rpartition(":")[2]))
                writer.write(head.encode())
                answer = await asyncio.wait_for(reader.read(), 10)
                writer.close()
                assert answer.startswith(b"HTTP/1.1 403")
            assert asked == ["rebound.example", "rebound.example"]
            assert canary.asked == []
        finally:
            await gateway.aclose()
            await canary.aclose()

    asyncio.run(main())


def test_a_name_is_connected_to_where_its_one_look_up_led(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leads to afterwards was judged by nobody."""
    site = Site({"/": "<h1>site</h1>"})

    async def main() -> None:
        await site.start()
        port = int(site.origin.rpartition(":")[2])
        gateway = Gateway(NavigationRules(private=True))
        await gateway.start()
        asked: list[str] = []

        async def resolve(host: str, port: int, **_: object) -> list[object]:
            asked.append(host)
            return [(2, 1, 6, "", ("127.0.0.1", port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        page = b"GET / HTTP/1.1\r\nhost: rebound.example\r\n\r\n"
        try:
            for head, tunnelled in (
                (f"GET http://rebound.example:{port}/ HTTP/1.1\r\nhost: rebound.example\r\n\r\n", b""),
                (f"CONNECT rebound.example:{port} HTTP/1.1\r\nhost: rebound.example\r\n\r\n", page),
            ):
                asked.clear()
                reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.address.rpartition(":")[2]))
                writer.write(head.encode() + tunnelled)
                answer = await asyncio.wait_for(reader.read(), 60)
                writer.close()
                assert answer.endswith(b"<h1>site</h1>"), answer
                assert asked == ["rebound.example"]
        finally:
            await gateway.aclose()
            await site.aclose()

    asyncio.run(main())


def test_the_browser_does_not_know_the_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SESSION_SOCKET_DIR_ENV, "/nowhere/secret-run-directory")

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/")
        driver = world.provider._driver
        assert driver is not None
        assert driver.process is not None
        pids = [driver.process.pid, *(each.pid for each in world.browser_processes())]
        for pid in pids:
            with open(f"/proc/{pid}/environ", "rb") as file:
                assert b"secret-run-directory" not in file.read()
        flags = command_line(world.browser_processes()[0])
        assert any(flag.startswith("--user-data-dir=") for flag in flags)
        assert "--remote-debugging-pipe" in flags
        assert not [flag for flag in flags if flag.startswith("--remote-debugging-port")]

    play({"/": "<p>x</p>"}, script)
