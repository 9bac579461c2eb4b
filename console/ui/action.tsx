// Action buttons, dialogs and messages about their outcome.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { asError } from "../app/live.ts";
import { Failure, Name, visible } from "./text.tsx";
import type { ApiError } from "../api/client.ts";

interface Message {
  id: number;
  text: string;
  bad: boolean;
}

let messages: Message[] = [], lastID = 0, changed = () => {};

// notify shows a message for some seconds.
export function notify(text: string, bad = false) {
  const message = { id: ++lastID, text, bad };
  messages = [...messages, message];
  changed();
  setTimeout(() => {
    messages = messages.filter((m) => m !== message);
    changed();
  }, bad ? 12_000 : 5000);
}

export function Messages() {
  const [, set] = useState(0);
  changed = () => set((n) => n + 1);
  return (
    <div class="messages" role="status" aria-live="polite">
      {messages.map((m) => (
        <p key={m.id} class={m.bad ? "failure" : ""}>
          <Name>{m.text}</Name>
        </p>
      ))}
    </div>
  );
}

// Action is a button that calls run and shows its error. If confirm is set, the reader has to confirm it first.
export function Action({ children, run, done, confirm: question, danger, disabled }: {
  children: ComponentChildren;
  run: () => Promise<unknown>;
  done?: string;
  confirm?: string;
  danger?: boolean;
  disabled?: boolean;
}) {
  const [busy, setBusy] = useState(false);
  const [asking, setAsking] = useState(false);
  const start = () => {
    setAsking(false);
    setBusy(true);
    run().then(() => done && notify(done), (e) => notify(asError(e).message, true)).finally(() => setBusy(false));
  };
  return (
    <>
      <button
        type="button" // in a form, the Enter key must not press it
        class={danger ? "danger" : ""}
        disabled={busy || disabled}
        aria-busy={busy}
        onClick={() => question ? setAsking(true) : start()}>
        {children}
      </button>
      {asking && (
        <Dialog title={question!} close={() => setAsking(false)}>
          <div class="actions">
            <button class={danger ? "danger" : "primary"} onClick={start}>{children}</button>
            <button onClick={() => setAsking(false)}>Back</button>
          </div>
        </Dialog>
      )}
    </>
  );
}

// Dialog is a modal window. Escape closes it.
export function Dialog({ title, close, children }: { title: string; close: () => void; children: ComponentChildren }) {
  const at = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    at.current?.showModal();
  }, []);
  return (
    <dialog ref={at} aria-label={visible(title)} onClose={close}>
      <header>
        <h2>
          <Name>{title}</Name>
        </h2>
        <button aria-label="Close" onClick={close}>×</button>
      </header>
      {children}
    </dialog>
  );
}

// Opener is a button that shows a dialog, such as a form.
export function Opener({ label, title, children, primary }: {
  label: string;
  title?: string;
  children: (close: () => void) => ComponentChildren;
  primary?: boolean;
}) {
  const [open, set] = useState(false);
  return (
    <>
      <button class={primary ? "primary" : ""} onClick={() => set(true)}>{label}</button>
      {open && <Dialog title={title ?? label} close={() => set(false)}>{children(() => set(false))}</Dialog>}
    </>
  );
}

// useSubmit returns the state of a form: submit sends a value, busy disables its button, failure shows its error.
export function useSubmit<T>(send: (value: T) => Promise<unknown>) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<ApiError>();
  const submit = async (value: T) => {
    setBusy(true);
    setError(undefined);
    try {
      await send(value);
    } catch (e) {
      setError(asError(e));
    } finally {
      setBusy(false);
    }
  };
  return { busy, submit, failure: <Failure of={error} /> };
}

// Secret shows a value that the server returns only once.
export function Secret({ label, value }: { label: string; value: string }) {
  return (
    <div class="secret">
      <p>{label} Copy it now: it is not shown again.</p>
      <input readOnly value={value} aria-label={label} onFocus={(e) => e.currentTarget.select()} />
      {navigator.clipboard && <Action run={() => navigator.clipboard.writeText(value)} done="Copied.">Copy</Action>}
    </div>
  );
}
