import { useState } from "preact/hooks";
import { send } from "../api/client.ts";
import type { Batch } from "../api/schema.ts";
import { navigate, path } from "../app/router.ts";
import { Form } from "../ui/form.tsx";
import { bytes, Name } from "../ui/text.tsx";

const more = ["max_parallel", "stop_on_failure", "priority", "metadata", "webhook_url", "item_webhooks"];

// NewBatch creates a batch from a shared request and items: text, or a file, which is not read into memory.
export function NewBatch() {
  const [text, setText] = useState("");
  const [file, setFile] = useState<File>();
  const create = async (settings: Record<string, unknown>) => {
    const { type, body } = await bodyOf(settings, file ?? text);
    const answer = await send("POST", "v1/batches", { body, headers: { "Content-Type": type } });
    navigate(path("batches", (await answer.json() as Batch).id));
  };
  return (
    <Form
      schema="BatchRequest"
      fields={["request"]}
      more={more}
      submit={create}
      label="Create">
      {() => (
        <fieldset
          onDragOver={(e) => e.preventDefault()}
          onDrop={(e) => (e.preventDefault(), e.dataTransfer?.files[0] && setFile(e.dataTransfer.files[0]))}>
          <legend>items</legend>
          <p class="help" id="items-help">
            One JSON object per line, or a JSON array of objects. Each has the fields of a request that differ from the
            shared one. Drop a file here, or paste its text.
          </p>
          {file
            ? (
              <div class="actions">
                <Name>{`${file.name}, ${bytes(file.size)}`}</Name>
                <button type="button" onClick={() => setFile(undefined)}>Remove file</button>
              </div>
            )
            : (
              <textarea
                rows={8}
                required
                spellcheck={false}
                aria-label="items"
                aria-describedby="items-help"
                value={text}
                placeholder={`{"args": ["one"]}\n{"args": ["two"], "metadata": {"row": "2"}}`}
                onInput={(e) => setText(e.currentTarget.value)} />
            )}
          <input
            type="file"
            aria-label="File of items"
            accept=".json,.jsonl,.ndjson,.txt"
            onChange={(e) => setFile(e.currentTarget.files?.[0])} />
        </fieldset>
      )}
    </Form>
  );
}

// bodyOf returns the body of the request in one of the API's two formats.
async function bodyOf(settings: Record<string, unknown>, items: string | File): Promise<{ type: string; body: Blob }> {
  const start = typeof items === "string" ? items : await items.slice(0, 1024).text();
  const json = JSON.stringify(settings);
  if (start.trimStart().startsWith("[")) {
    return {
      type: "application/json",
      body: new Blob([json === "{}" ? "{" : json.slice(0, -1) + ",", `"items":`, items, "}"]),
    };
  }
  return { type: "application/jsonl", body: new Blob([json === "{}" ? "" : `{"batch":${json}}\n`, items]) };
}
