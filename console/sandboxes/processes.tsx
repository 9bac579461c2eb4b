import { useEffect, useState } from "preact/hooks";
import type { ApiError } from "../api/client.ts";
import { pause, type StreamState } from "../api/events.ts";
import { asError, useLive, usePolling } from "../app/live.ts";
import { useParam } from "../app/router.ts";
import { Action, useSubmit } from "../ui/action.tsx";
import { Log, StreamSign, useLog } from "../ui/output.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { Empty, Failure, Name } from "../ui/text.tsx";
import { output, type Process, processes, sendSignal, start } from "./guest.ts";

// Processes lists the processes of a running sandbox, starts commands, and shows the output of one process. It does not
// poll a sandbox with an idle timeout, because each request counts as use.
export function Processes({ id, idle }: { id: string; idle: boolean }) {
  const [pid, setPID] = useParam("pid");
  const [command, setCommand] = useState("");
  const [user, setUser] = useState("user");
  const list = useLive((signal) => processes(id, signal), [id]);
  usePolling(3000, ...idle ? [] : [list]);
  const { busy, submit, failure } = useSubmit(async (text: string) => {
    setPID(String(await start(id, user, text)));
    list.reload();
  });
  const columns: Column<Process>[] = [
    { head: "PID", cell: (p) => p.pid, class: "number" },
    {
      head: "Command",
      cell: (p) => (
        <code>
          <Name>{[p.config?.cmd, ...p.config?.args ?? []].join(" ")}</Name>
        </code>
      ),
    },
    { head: "Directory", cell: (p) => <Name>{p.config?.cwd}</Name> },
    {
      head: "Actions",
      cell: (p) => (
        <>
          <button onClick={() => setPID(String(p.pid))}>Output</button>{" "}
          <Action run={() => sendSignal(id, p.pid, "SIGNAL_SIGTERM").then(list.reload)}>Stop</Action>{" "}
          <Action danger run={() => sendSignal(id, p.pid, "SIGNAL_SIGKILL").then(list.reload)}>Kill</Action>
        </>
      ),
    },
  ];
  return (
    <>
      <form class="actions" onSubmit={(e) => (e.preventDefault(), submit(command))}>
        <input
          class="mono wide"
          aria-label="Command"
          placeholder="shell command, such as ls -la"
          required
          spellcheck={false}
          value={command}
          onInput={(e) => setCommand(e.currentTarget.value)} />
        <select aria-label="User" value={user} onChange={(e) => setUser(e.currentTarget.value)}>
          <option>user</option>
          <option>root</option>
        </select>
        <button class="primary" disabled={busy} aria-busy={busy}>Start</button>
        {idle && <button type="button" onClick={list.reload}>Refresh</button>}
      </form>
      {failure}
      {pid && <ProcessOutput key={pid} id={id} pid={Number(pid)} ended={list.reload} close={() => setPID("")} />}
      <Table
        label="Processes"
        columns={columns}
        list={{ ...list, value: list.value ?? (list.error && []) }}
        keyOf={(p) => String(p.pid)}
        empty={
          <Empty command={`bullpen sandbox exec ${id} -- ls -la`}>
            No processes. Start one here, or:
          </Empty>
        } />
    </>
  );
}

function ProcessOutput({ id, pid, ended, close }: { id: string; pid: number; ended: () => void; close: () => void }) {
  const log = useLog([id, pid]);
  const [state, setState] = useState<StreamState>("connecting");
  const [error, setError] = useState<ApiError>();
  const [end, setEnd] = useState<string>();
  useEffect(() => {
    const stop = new AbortController();
    const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
    const add = (stream: "stdout" | "stderr", text: string) => {
      const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
      log.add(stream, decoders[stream].decode(bytes, { stream: true }));
    };
    (async () => {
      let after = "0";
      for (let failures = 0; !stop.signal.aborted; failures++) {
        try {
          for await (const e of output(id, pid, after, stop.signal)) {
            setState("live");
            failures = 0;
            if (e.data) {
              after = e.data.seq ?? after;
              if (e.data.stderr) add("stderr", e.data.stderr);
              else add("stdout", e.data.stdout ?? e.data.pty ?? "");
            } else if (e.gap) {
              after = e.gap.last ?? after;
              log.add("gap", "… output missing …\n");
            } else if (e.end) {
              setEnd(e.end.exited ? `exit code ${e.end.exitCode ?? 0}` : e.end.status ?? "ended");
              setState("ended");
              return ended();
            }
          }
        } catch (e) {
          const failed = asError(e);
          if (stop.signal.aborted) return;
          if (failed.status >= 400 && failed.status < 500 && failed.status !== 429) {
            setError(failed);
            return setState("failed");
          }
        }
        setState("stale");
        await pause(Math.min(15_000, 500 * 2 ** failures), stop.signal);
      }
    })();
    return () => stop.abort();
  }, [id, pid]);
  return (
    <section aria-label={`Output of process ${pid}`}>
      <div class="actions">
        <b>Process {pid}</b> <StreamSign state={state} /> {end && <Name>{end}</Name>}
        <button class="quiet" onClick={close}>Close</button>
      </div>
      <Failure of={error} />
      {log.cut && <p class="faint">Only the end is shown.</p>}
      <Log pieces={log.pieces} ended={state === "ended"} />
    </section>
  );
}
