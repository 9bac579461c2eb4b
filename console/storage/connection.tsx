import { address, call } from "../api/client.ts";
import type { Connection, ConnectionRequest, ForkVolumeRequest } from "../api/schema.ts";
import { useLive } from "../app/live.ts";
import { navigate, path, useParam } from "../app/router.ts";
import { useMay, useSession } from "../app/session.ts";
import { stored } from "../threads/source.ts";
import { Difference, Execution, VersionChoice, Versions } from "../threads/versions.tsx";
import { Action, Opener } from "../ui/action.tsx";
import { Files } from "../ui/files.tsx";
import { Form } from "../ui/form.tsx";
import { Tabs } from "../ui/tabs.tsx";
import { bytes, count, Facts, Failure, Name, Time } from "../ui/text.tsx";

const settings: Record<Connection["kind"], string[]> = {
  s3: ["bucket", "endpoint", "region", "path_style", "credential", "prefix", "read_only", "description"],
  directory: ["directory", "prefix", "read_only", "description"],
  volume: ["bytes", "prefix", "read_only", "description"],
};

export function Storage({ args: { slug } }: { args: Record<string, string> }) {
  const [org] = useParam("org");
  const at = { slug, org };
  const read = (signal: AbortSignal) => call("getConnection", at, signal);
  const { value: c, error, reload } = useLive(read, [slug, org], "connections");
  const { org: own } = useSession();
  const mayFiles = useMay("files") && (!org || org === own); // the routes of files have no parameter org
  const [version] = useParam("version");
  const number = Number(version) || undefined;
  const isVolume = c?.kind === "volume";
  const volume = useLive(
    async (signal) => isVolume ? await call("getVolume", at, signal) : undefined,
    [slug, org, isVolume],
    "connections",
    "executions",
  );
  if (!c) return <Failure of={error} />;
  const v = volume.value;
  return (
    <>
      <div class="actions">
        <code>{slug}</code>
        {c.kind === "s3" && (
          <Action done="The connection works." run={() => call("testConnection", at).then(reload)}>Test</Action>
        )}
        <Opener label="Edit">
          {(close) => (
            <Form
              schema="ConnectionRequest"
              fields={settings[c.kind]}
              label="Save"
              value={{ ...c }}
              submit={async (v) => {
                const body = { ...v, slug, kind: c.kind } as unknown as ConnectionRequest;
                await call("replaceConnection", { ...at, body });
                close();
                reload();
              }} />
          )}
        </Opener>
        {isVolume && (
          <a class="button" href={address("archiveVolume", { ...at, version: number }).href} download={`${slug}.tar`}>
            Download tar
          </a>
        )}
        {isVolume && (
          <Opener label="Fork">
            {(close) => (
              <Form
                schema="ForkVolumeRequest"
                label="Fork"
                value={{ version: number }}
                submit={async (body) => {
                  const made = await call("forkVolume", { ...at, body: body as unknown as ForkVolumeRequest });
                  close();
                  navigate(path("storage", made.slug), { org });
                }} />
            )}
          </Opener>
        )}
        <Action
          danger
          confirm={isVolume
            ? "Remove this volume with all its versions and files?"
            : "Remove this connection? Its files are kept."}
          run={() => call("removeConnection", at).then(() => navigate("/storage"))}>
          Remove
        </Action>
      </div>
      <Failure of={error ?? volume.error} />
      <Facts
        of={[
          ["Kind", c.kind],
          ["Organisation", c.org],
          ["Endpoint", c.endpoint && <Name>{c.endpoint}</Name>],
          ["Bucket", c.bucket],
          ["Region", c.region],
          ["Credential", c.credential],
          ["Directory", c.directory && <Name>{c.directory}</Name>],
          ["Prefix", c.prefix && <Name>{c.prefix}</Name>],
          ["Access", c.read_only ? "read only" : "read and write"],
          ["Description", c.description && <Name>{c.description}</Name>],
          ["Tested", c.tested_at ? <Time at={c.tested_at} /> : undefined],
          ["Created", <Time at={c.created_at} />],
          ["Updated", <Time at={c.updated_at} />],
          ["Quota", v && bytes(v.quota)],
          ["Version", v?.version],
          ["Size", v && bytes(v.bytes)],
          ["Files", v && count(v.files)],
          ["Held by", v && <Execution id={v.holder} />],
        ]} />
      <Tabs
        of={[
          mayFiles && ["Files", () => (
            <>
              {v && <VersionChoice of={v.versions} />}
              <Files of={stored("volume", slug, number, !c.read_only)} />
            </>
          )],
          v && ["Versions", () => <Versions of={v.versions} mayFiles={mayFiles} />],
          v && mayFiles && ["Compare", () => <Difference source="volume" id={slug} versions={v.versions} />],
        ]} />
    </>
  );
}
