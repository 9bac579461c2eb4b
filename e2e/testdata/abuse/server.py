"""A hostile server in a sandbox: `server.py PORT`. The path of a request names the attack of its answer.

/seen returns the heads of all requests so far, and any other path the head of the request.
"""
import socket
import sys
import threading

STOLEN = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nstolen"
EVIL = b"Set-Cookie: evil=1\r\nBullpen-Ticket: evil\r\nX-Api-Key: evil\r\nX-Request-Id: evil\r\nClear-Site-Data: evil\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "/headers": OK + EVIL + b"Content-Length: 2\r\n\r\nok",
    "/redirect": b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\n" + EVIL + b"Content-Length: 0\r\n\r\n",
    "/interim": (b"HTTP/1.1 103 Early Hints\r\n" + EVIL + b"\r\n") * 3 + OK + b"Content-Length: 2\r\n\r\nok",
    "/trailers": OK + b"Transfer-Encoding: chunked\r\nTrailer: Set-Cookie, Fine\r\n\r\n2\r\nok\r\n0\r\nFine: yes\r\n"
    + EVIL + b"\r\n",
    "/connection": OK + EVIL + b"Connection: Content-Length, X-Request-Id\r\nContent-Length: 2\r\n\r\nok",
    "/two": OK + b"Content-Length: 2\r\n\r\nok" + STOLEN,
    "/both": OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + STOLEN,
    "/lengths": OK + b"Content-Length: 2\r\nContent-Length: 60\r\n\r\nok" + STOLEN,
    "/empty": b"HTTP/1.1 204 No Content\r\nContent-Length: 40\r\n\r\n" + STOLEN,
    "/unchanged": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 40\r\n\r\n" + STOLEN,
    "/switch": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n" + STOLEN,
    "/extension": OK + b"Transfer-Encoding: chunked\r\n\r\n2;a=\"\r\nok\r\n0\r\n\r\n" + STOLEN,
    "/short": OK + b"Content-Length: 100\r\n\r\nok",
    "/none": b"",
    "/garbage": b"\x16\x03\x01 \x1b[31m garbage\r\n\r\n",
    "/denied": b"HTTP/1.1 530 No\r\nContent-Length: 2\r\n\r\nok",
    "/huge": OK + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 60000) for i in range(100)) + b"Content-Length: 2\r\n\r\nok",
}
ENDLESS = {"/endless": (OK, b"A: " + b"a" * 1000 + b"\r\n"), "/hints": (b"", b"HTTP/1.1 103 Early Hints\r\nA: a\r\n\r\n")}
seen = []


def serve(conn):
    head = b""
    while b"\r\n\r\n" not in head:
        part = conn.recv(65536)
        if not part:
            return
        head += part
    head = head[: head.index(b"\r\n\r\n") + 4]
    path = head.split()[1].decode().split("?")[0]
    if path == "/seen":
        body = b"".join(seen)
        conn.sendall(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return
    seen.append(head)
    if path in ENDLESS:
        start, again = ENDLESS[path]
        conn.sendall(start)
        while True:
            conn.sendall(again * 100)
    conn.sendall(ANSWERS.get(path, OK + b"Content-Length: %d\r\n\r\n" % len(head) + head))


def run(conn):
    try:
        serve(conn)
    except OSError:
        pass  # the client has left
    conn.close()


listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=512)
print("listening", flush=True)
while True:
    threading.Thread(target=run, args=(listener.accept()[0],), daemon=True).start()
