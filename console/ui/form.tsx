// Forms generated from the schemas of the OpenAPI document: a field for each property, with its description. A new
// property of the API needs no change here.
import type { ComponentChildren } from "preact";
import { useContext, useEffect, useId, useState } from "preact/hooks";
import { base, sendJSON } from "../api/client.ts";
import { asError } from "../app/live.ts";
import { useSubmit } from "./action.tsx";
import { Editor } from "./editor.tsx";
import { Failure, Zone } from "./text.tsx";
import type { ApiError } from "../api/client.ts";

interface Schema {
  $ref?: string;
  type?: string | string[];
  description?: string;
  default?: unknown;
  enum?: unknown[];
  properties?: Record<string, Schema>;
  required?: string[];
  items?: Schema;
  additionalProperties?: Schema | boolean;
  anyOf?: Schema[];
  oneOf?: Schema[];
  maxLength?: number;
  format?: string;
}

type Value = Record<string, unknown>;

let document: Promise<Record<string, Schema>> | undefined;

function schemas(): Promise<Record<string, Schema>> {
  document ??= sendJSON<{ components: { schemas: Record<string, Schema> } }>("GET", new URL("openapi.json", base))
    .then((d) => d.components.schemas)
    .catch((e) => {
      document = undefined; // the next form tries again
      throw e;
    });
  return document;
}

// Form edits an object of a schema. It shows the properties fields, if set, in this order, and those of more under
// "More settings". If first is set, it shows the schema's properties among first, and all others under "More settings".
// The result of children follows the field after, or the last field.
// Form sends no empty properties, and none that the schema lacks: value may be a whole object, of which only some
// properties are settings.
export function Form(
  { schema: name, value: initial = {}, fields, more, first, hidden, children, after, submit: send, label, code }: {
    schema: string;
    value?: Value;
    fields?: string[];
    more?: string[];
    first?: string[];
    hidden?: string[]; // properties that are sent as they are
    children?: (value: Value) => ComponentChildren;
    after?: string;
    submit: (value: Value) => Promise<unknown>;
    label: string;
    code?: string; // the language of a property that is a program
  },
) {
  const [all, setAll] = useState<Record<string, Schema>>();
  const [error, setError] = useState<ApiError>();
  const [value, setValue] = useState<Value>(initial);
  const { busy, submit, failure } = useSubmit(send);
  useEffect(() => {
    schemas().then(setAll, (e) => setError(asError(e)));
  }, []);
  if (error) return <Failure of={error} />;
  if (!all) return <p class="faint">Loading …</p>;
  const schema = resolve(all[name], all);
  const known = () => Object.fromEntries(Object.entries(value).filter(([name]) => schema.properties?.[name]));
  const props = { all, schema, value, set: setValue, hidden, code };
  if (first) {
    const names = Object.keys(schema.properties ?? {}).filter((n) => !hidden?.includes(n));
    fields = first.filter((n) => names.includes(n));
    more = names.filter((n) => !first.includes(n)).sort();
  }
  return (
    <form class="form" onSubmit={(e) => (e.preventDefault(), submit(pruned(known())))}>
      <Fields {...props} fields={after ? fields!.slice(0, fields!.indexOf(after) + 1) : fields} />
      {children?.(value)}
      {after && <Fields {...props} fields={fields!.slice(fields!.indexOf(after) + 1)} />}
      {!!more?.length && <MoreFields {...props} fields={more} />}
      {failure}
      <div class="actions">
        <button class="primary" type="submit" disabled={busy} aria-busy={busy}>{label}</button>
      </div>
    </form>
  );
}

interface FieldsProps {
  all: Record<string, Schema>;
  schema: Schema;
  value: Value;
  set: (v: Value) => void;
  fields?: string[];
  hidden?: string[];
  code?: string;
}

function MoreFields(props: FieldsProps) {
  return (
    <details class="form">
      <summary>
        More settings: <span class="faint">{props.fields!.join(", ")}</span>
      </summary>
      <Fields {...props} />
    </details>
  );
}

function Fields({ all, schema, value, set, fields, hidden, code }: FieldsProps) {
  const required = schema.required ?? [];
  const names = fields ?? Object.keys(schema.properties ?? {}).filter((name) => !hidden?.includes(name)).sort(
    (a, b) => Number(required.includes(b)) - Number(required.includes(a)) || a.localeCompare(b),
  );
  return (
    <>
      {names.map((name) => (
        <Field
          key={name}
          name={name}
          all={all}
          schema={resolve(schema.properties?.[name], all)}
          code={code}
          required={required.includes(name)}
          value={value[name]}
          set={(v) => set({ ...value, [name]: v })} />
      ))}
    </>
  );
}

// resolve follows references, and returns the other schema of a nullable one.
function resolve(schema: Schema | undefined, all: Record<string, Schema>): Schema {
  if (!schema) return {};
  const other = schema.$ref
    ? all[schema.$ref.slice(schema.$ref.lastIndexOf("/") + 1)]
    : schema.anyOf?.find((s) => s.type !== "null");
  return other
    ? { ...resolve(other, all), ...(schema.description ? { description: schema.description } : {}) }
    : schema;
}

function Field({ name, all, schema, value, set, required, code }: {
  name: string;
  all: Record<string, Schema>;
  schema: Schema;
  value: unknown;
  set: (v: unknown) => void;
  required: boolean;
  code?: string;
}) {
  const id = useId();
  const zone = useContext(Zone);
  const types = [schema.type ?? []].flat().filter((t) => t !== "null");
  const type = types.includes("string") ? "string" : types[0];
  const initial = schema.default === undefined || schema.default === "" ? "" : String(schema.default);
  if (type === "object" && schema.properties) {
    const names = Object.keys(schema.properties);
    const program = ["language", "code"].filter((n) => names.includes(n)); // of a request, which has many other fields
    const object = (value ?? {}) as Value;
    const props = { all, schema, value: object, set, code: object.language as string ?? code };
    return (
      <fieldset>
        <legend>{name}</legend>
        {schema.description && <p class="help">{schema.description}</p>}
        <Fields {...props} fields={program.length ? program : undefined} />
        {program.length > 0 && <MoreFields {...props} fields={names.filter((n) => !program.includes(n)).sort()} />}
      </fieldset>
    );
  }
  const common = { id, "aria-describedby": id + "h", required, name };
  const text = (e: { currentTarget: { value: string } }) => set(e.currentTarget.value);
  let input;
  if (schema.enum && type === "string") {
    input = (
      <select {...common} value={value as string ?? ""} onChange={text}>
        {!required && <option value="">{initial ? `default: ${initial}` : "default"}</option>}
        {schema.enum.filter(Boolean).map((v) => <option key={String(v)} value={String(v)}>{String(v)}</option>)}
      </select>
    );
  } else if (type === "boolean") {
    input = (
      <select
        {...common}
        value={value === undefined || value === null ? "" : String(value)}
        onChange={(e) => set(e.currentTarget.value === "" ? undefined : e.currentTarget.value === "true")}>
        <option value="">{initial ? `default: ${initial === "true" ? "yes" : "no"}` : "default"}</option>
        <option value="true">yes</option>
        <option value="false">no</option>
      </select>
    );
  } else if (type === "number" || type === "integer") {
    input = (
      <input
        {...common}
        type="number"
        step={type === "integer" ? 1 : "any"}
        placeholder={initial}
        value={value as number ?? ""}
        onInput={(e) => set(e.currentTarget.value === "" ? undefined : Number(e.currentTarget.value))} />
    );
  } else if (type === "array" && resolve(schema.items, all).enum) {
    const chosen = (value ?? schema.default ?? []) as string[];
    input = (
      <div class="choices" role="group" aria-label={name} id={id}>
        {resolve(schema.items, all).enum!.map((v) => (
          <label key={String(v)}>
            <input
              type="checkbox"
              checked={chosen.includes(v as string)}
              onChange={(e) => set(e.currentTarget.checked ? [...chosen, v] : chosen.filter((c) => c !== v))} />
            {String(v)}
          </label>
        ))}
      </div>
    );
  } else if (type === "array" && resolve(schema.items, all).type === "string") {
    input = (
      <Lines
        {...common}
        value={(value as string[] ?? []).join("\n")}
        placeholder="one per line"
        parse={(lines) => set(lines.length ? lines : undefined)} />
    );
  } else if (type === "object" && (schema.additionalProperties as Schema)?.type === "string") {
    input = (
      <Lines
        {...common}
        value={Object.entries(value as Record<string, string> ?? {}).map(([k, v]) => `${k}=${v}`).join("\n")}
        placeholder="name=value, one per line"
        parse={(lines) => set(lines.length ? Object.fromEntries(lines.map(pair)) : undefined)} />
    );
  } else if (type === "array" || type === "object" || schema.oneOf) {
    input = <JSONField {...common} value={value} set={set} />;
  } else if (name === "code" || name === "file") {
    input = <Editor label={name} language={code ?? "python"} value={value as string ?? ""} onInput={set} />;
  } else if (schema.format === "date-time") {
    input = (
      <input
        {...common}
        type="datetime-local"
        value={toInput(value as string, zone)}
        onInput={(e) => set(fromInput(e.currentTarget.value, zone))} />
    );
  } else if (schema.format === "password" || name === "value") {
    input = (
      <textarea
        {...common}
        class="hidden-value"
        autocomplete="off"
        spellcheck={false}
        value={value as string ?? ""}
        onInput={text} />
    );
  } else {
    input = <input {...common} value={value as string ?? ""} placeholder={initial} spellcheck={false} onInput={text} />;
  }
  return (
    <div class="field">
      <label for={id}>{name} {required && <span class="faint">(required)</span>}</label>
      {input}
      <p class="help" id={id + "h"}>{schema.description}</p>
    </div>
  );
}

const pair = (line: string): [string, string] => {
  const at = line.indexOf("=");
  return at < 0 ? [line, ""] : [line.slice(0, at), line.slice(at + 1)];
};

function Lines(
  { parse, value, ...rest }: { parse: (lines: string[]) => void; value: string; placeholder: string; id: string },
) {
  const [text, setText] = useState(value);
  return (
    <textarea
      {...rest}
      rows={3}
      spellcheck={false}
      value={text}
      onInput={(e) => (setText(e.currentTarget.value), parse(e.currentTarget.value.split("\n").filter(Boolean)))} />
  );
}

function JSONField({ value, set, ...rest }: { value: unknown; set: (v: unknown) => void; id: string }) {
  const [text, setText] = useState(value === undefined || value === null ? "" : JSON.stringify(value, null, 2));
  return (
    <textarea
      {...rest}
      rows={5}
      spellcheck={false}
      placeholder="JSON"
      value={text}
      onInput={(e) => {
        setText(e.currentTarget.value);
        try {
          set(e.currentTarget.value ? JSON.parse(e.currentTarget.value) : undefined);
          e.currentTarget.setCustomValidity("");
        } catch {
          e.currentTarget.setCustomValidity("This is not valid JSON.");
        }
      }} />
  );
}

// pruned returns value without empty properties.
function pruned(value: Value): Value {
  const kept: Value = {};
  for (const [name, v] of Object.entries(value)) {
    const part = v && typeof v === "object" && !Array.isArray(v) ? pruned(v as Value) : v;
    const empty = part === undefined || part === null || part === "" ||
      typeof part === "object" && !Array.isArray(part) && !Object.keys(part).length;
    if (!empty) kept[name] = part;
  }
  return kept;
}

// TimeField is a filter by time. It passes set an RFC 3339 time.
export function TimeField(
  { name, value, set }: { name: string; value: string | null | undefined; set: (name: string, value: string) => void },
) {
  const zone = useContext(Zone);
  return (
    <label>
      {name}
      <br />
      <input
        type="datetime-local"
        value={toInput(value, zone)}
        onChange={(e) => set(name, fromInput(e.currentTarget.value, zone))} />
    </label>
  );
}

// toInput returns a time as the value of a datetime-local field, in the zone of the reader's choice.
function toInput(at: string | null | undefined, zone: "local" | "utc"): string {
  if (!at || isNaN(Date.parse(at))) return "";
  const time = new Date(at);
  return new Date(time.getTime() - (zone === "utc" ? 0 : time.getTimezoneOffset() * 60_000)).toISOString().slice(0, 16);
}

const fromInput = (text: string, zone: "local" | "utc") =>
  text && new Date(zone === "utc" ? text + "Z" : text).toISOString();
