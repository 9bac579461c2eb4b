import { call } from "../api/client.ts";
import type { ForkRequest } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { navigate, path, useParam } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { ExecutionTable } from "../executions/list.tsx";
import { Action, Opener } from "../ui/action.tsx";
import { FileName, Files } from "../ui/files.tsx";
import { Form } from "../ui/form.tsx";
import { Tabs } from "../ui/tabs.tsx";
import { bytes, count, Facts, Failure, Name, Time } from "../ui/text.tsx";
import { archive, stored } from "./source.ts";
import { Difference, Execution, VersionChoice, Versions } from "./versions.tsx";

export function Thread({ args: { id } }: { args: Record<string, string> }) {
  const { value: t, error } = useLive((signal) => call("getThread", { id }, signal), [id], "executions");
  const mayFiles = useMay("files");
  const [version] = useParam("version");
  if (!t) return <Failure of={error} />;
  const number = Number(version) || undefined;
  return (
    <>
      <div class="actions">
        <code>
          <Name>{id}</Name>
        </code>
        {mayFiles && <a class="button" href={archive(id, number)} download={`${id}.tar`}>Download tar</a>}
        {mayFiles && (
          <Opener label="Fork">
            {(close) => (
              <Form
                schema="ForkRequest"
                label="Fork"
                value={{ version: number }}
                submit={async (body) => {
                  const made = await call("forkThread", { id, body: body as unknown as ForkRequest });
                  close();
                  navigate(path("threads", made.id));
                }} />
            )}
          </Opener>
        )}
        {mayFiles && (
          <Action
            danger
            confirm="Delete this thread with all its versions and files?"
            run={() => call("deleteThread", { id }).then(() => navigate("/threads"))}>
            Delete
          </Action>
        )}
      </div>
      <Failure of={error} />
      <Facts
        of={[
          ["Version", t.version],
          ["Size", bytes(t.bytes)],
          ["Files", count(t.files)],
          ["Created", <Time at={t.created_at} />],
          ["Last used", <Time at={t.used_at} />],
          ["Held by", <Execution id={t.holder} />],
        ]} />
      {t.staged.length > 0 && !number && (
        <p class="faint">
          Waiting for the next execution: {t.staged.slice(0, 20).map((f, i) => (
            <span key={f.path}>
              {i > 0 && ", "}
              <FileName of={f.path} />
            </span>
          ))}
          {t.staged.length > 20 && ` and ${t.staged.length - 20} more`}
        </p>
      )}
      <Tabs
        of={[
          mayFiles && ["Files", () => (
            <>
              <VersionChoice of={t.versions} />
              <Files of={stored("thread", id, number, mayFiles)} />
            </>
          )],
          ["Versions", () => <Versions of={t.versions} mayFiles={mayFiles} />],
          mayFiles && ["Compare", () => <Difference source="thread" id={id} versions={t.versions} />],
          ["Executions", () => <ExecutionTable filter={{ thread_id: id }} empty="No executions." />],
        ]} />
    </>
  );
}
