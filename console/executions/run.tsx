import { useEffect, useState } from "preact/hooks";
import { call } from "../api/client.ts";
import type { ExecuteRequest } from "../api/schema.ts";
import { asError } from "../app/live.ts";
import { link, path, useLocation, useParam } from "../app/router.ts";
import { notify, useSubmit } from "../ui/action.tsx";
import { Editor } from "../ui/editor.tsx";
import { Form } from "../ui/form.tsx";
import { Output } from "../ui/output.tsx";
import { Section } from "../ui/text.tsx";
import { languages } from "./list.tsx";

const others = [
  "args",
  "stdin",
  "profile",
  "thread_id",
  "timeout",
  "env_vars",
  "metadata",
  "webhook_url",
  "sub_paths",
  "run_at",
  "max_attempts",
];

// Run submits programs and shows their output. The parameter from names an execution whose request it starts with.
export function Run() {
  const from = useLocation().query.get("from");
  const [language, setLanguage] = useParam("language", "python");
  const [id, setID] = useParam("id");
  const [code, setCode] = useState("");
  const [settings, setSettings] = useState<Record<string, unknown>>();
  useEffect(() => {
    if (!from) return setSettings({});
    const stop = new AbortController();
    call("getRequest", { id: from }, stop.signal).then((request) => {
      const { code, language, env_names, trace_id: _, delivery_mode: __, ...rest } = request;
      setCode(code);
      setLanguage(language);
      setSettings({ ...rest, env_vars: Object.fromEntries(env_names.map((name) => [name, ""])) });
      if (env_names.length) notify("The values of environment variables are not stored. Set them again.");
    }, (e) => stop.signal.aborted || (notify(asError(e).message, true), setSettings({})));
    return () => stop.abort();
  }, [from]);
  const send = async (rest: Record<string, unknown>) => {
    const accepted = await call("execute", {
      body: { ...rest, code, language } as ExecuteRequest,
      headers: { Prefer: "respond-async", "Idempotency-Key": crypto.getRandomValues(new Uint32Array(4)).join("-") },
    });
    setID((accepted as unknown as { trace_id: string }).trace_id);
  };
  const { busy, submit, failure } = useSubmit(send);
  const [advanced, setAdvanced] = useState(false);
  return (
    <div class="columns">
      <div>
        <div class="actions">
          <label>
            language{" "}
            <select value={language} onChange={(e) => setLanguage(e.currentTarget.value)}>
              {languages.map((l) => <option key={l}>{l}</option>)}
            </select>
          </label>
          {!advanced && (
            <button
              class="primary"
              disabled={busy || !code}
              aria-busy={busy}
              onClick={() => submit(settings ?? {})}>
              Run
            </button>
          )}
          <button aria-expanded={advanced} onClick={() => setAdvanced(!advanced)}>More settings</button>
        </div>
        <Editor label="Program" language={language} value={code} onInput={setCode} />
        {failure}
        {advanced && settings && (
          <Section title="Settings">
            <Form
              schema="ExecuteRequest"
              fields={others}
              value={settings}
              submit={(rest) => (setSettings(rest), send(rest))}
              label="Run" />
          </Section>
        )}
      </div>
      <div>
        {id && (
          <Section title="Output" actions={<a href={link(path("executions", id))}>{id}</a>}>
            <Output key={id} id={id} />
          </Section>
        )}
      </div>
    </div>
  );
}
