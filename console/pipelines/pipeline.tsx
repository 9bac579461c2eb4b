import { address, call } from "../api/client.ts";
import type { PipelineCell, WholePipeline } from "../api/schema.ts";
import { useLive, useTick } from "../app/live.ts";
import { link, path, useLocation } from "../app/router.ts";
import { useMay } from "../app/session.ts";
import { ExecutionTable } from "../executions/list.tsx";
import { Action } from "../ui/action.tsx";
import { Waterfall } from "../ui/chart.tsx";
import { Output } from "../ui/output.tsx";
import { duration, Facts, Failure, Name, Problem, Section, Status, Time, visible } from "../ui/text.tsx";
import { Graph, keyOf } from "./graph.tsx";
import { Took, took } from "./list.tsx";

export function Pipeline({ args: { id } }: { args: Record<string, string> }) {
  const { value: p, error, reload } = useLive((signal) => call("getPipeline", { id }, signal), [id], "pipelines");
  const wanted = useLocation().query.get("cell");
  const mayExecute = useMay("execute");
  if (!p) return <Failure of={error} />;
  const cell = p.cells.find((c) => keyOf(c) === wanted) ?? mostInteresting(p.cells);
  return (
    <>
      <div class="actions">
        <strong>
          <Name>{p.name ?? "Run"}</Name>
        </strong>{" "}
        <Status of={p.cancelling && !p.ended_at ? "cancelling" : p.status} />
        <code>{id}</code>
        {mayExecute && !p.ended_at && !p.cancelling && (
          <Action
            danger
            confirm="Cancel all steps that have not ended?"
            run={() => call("cancelPipeline", { id }).then(reload)}>
            Cancel
          </Action>
        )}
      </div>
      <Failure of={error} />
      <Problem of={p.reason} />
      <Graph id={id} cells={p.cells} chosen={cell} />
      {cell && <Cell key={keyOf(cell)} id={id} cell={cell} reload={reload} />}
      <Report p={p} />
      <Section title="Executions">
        <ExecutionTable filter={{ pipeline: id }} empty="No step has started yet." />
      </Section>
    </>
  );
}

// mostInteresting returns the cell that is shown until the reader chooses one.
function mostInteresting(cells: PipelineCell[]): PipelineCell | undefined {
  for (const status of ["failed", "running", "cancelled"]) {
    const found = cells.find((c) => c.status === status && c.trace_id);
    if (found) return found;
  }
  return cells.findLast((c) => c.status === "success") ?? cells[0];
}

function Cell({ id, cell: c, reload }: { id: string; cell: PipelineCell; reload: () => void }) {
  const mayFiles = useMay("files");
  return (
    <Section
      title={`Step ${keyOf(c)}`}
      actions={c.trace_id && <a href={link(path("executions", c.trace_id))}>{c.trace_id}</a>}>
      <Facts
        of={[
          ["Status", <Status of={c.status} />],
          ["Exit code", c.exit_code ?? undefined],
          ["Needs", c.needs.length ? <Name>{c.needs.join(", ")}</Name> : undefined],
          ["Started", <Time at={c.started_at} />],
          ["Ran", c.started_at ? <Took from={c.started_at} to={c.ended_at} /> : undefined],
          ["Waiting for", c.waiting_for?.message],
        ]} />
      <Problem of={c.reason} />
      {c.warnings.map((w, i) => (
        <p key={i}>
          <span class="status wait">
            <Name>{w}</Name>
          </span>
        </p>
      ))}
      {c.artifacts.length > 0 && (
        <div class="actions">
          Artifacts:
          {c.artifacts.map((a) =>
            mayFiles && c.artifacts_kept
              ? (
                <a
                  class="button"
                  key={a.name}
                  download
                  title={visible(a.paths.join(", "))}
                  href={address("getPipelineArtifact", {
                    id,
                    step: c.step,
                    cell: c.cell ?? undefined,
                    artifact: a.name,
                  }).href}>
                  {a.name}.tar
                </a>
              )
              : <span class="pair" key={a.name}>{a.name}{!c.artifacts_kept && ": not stored yet"}</span>
          )}
        </div>
      )}
      {c.trace_id ? <Output id={c.trace_id} onResult={reload} /> : <p class="faint">No output.</p>}
    </Section>
  );
}

// Report shows how long the steps of a run took, and which failed.
function Report({ p }: { p: WholePipeline }) {
  useTick();
  const begin = Date.parse(p.created_at);
  const ran = p.cells.filter((c) => c.started_at);
  const failed = p.cells.filter((c) => c.status === "failed");
  const slowest = ran.toSorted((a, b) => took(b.started_at, b.ended_at)! - took(a.started_at, a.ended_at)!)[0];
  const to = (c: PipelineCell) => link(`/pipelines/${p.id}`, { cell: keyOf(c) });
  const counts = Map.groupBy(p.cells, (c) => c.status);
  return (
    <Section title="Report">
      <Facts
        of={[
          ["Steps", [...counts].map(([status, list]) => `${list.length} ${status}`).join(", ")],
          ["Took", duration(took(p.created_at, p.ended_at))],
          ["Created", <Time at={p.created_at} />],
          [
            "Slowest",
            slowest && (
              <a href={to(slowest)}>
                <Name>{keyOf(slowest)}</Name>
              </a>
            ),
          ],
          [
            "Failed",
            failed.length
              ? failed.map((c, i) => (
                <span key={keyOf(c)}>
                  {i > 0 && ", "}
                  <a href={to(c)}>
                    <Name>{keyOf(c)}</Name>
                  </a>
                </span>
              ))
              : undefined,
          ],
          ["Branch", p.branch ? <Name>{p.branch}</Name> : undefined],
          [
            "Commit",
            p.commit
              ? (
                <code>
                  <Name>{p.commit}</Name>
                </code>
              )
              : undefined,
          ],
        ]} />
      <Waterfall
        label="Steps by time"
        steps={ran.map((c) => ({
          name: keyOf(c),
          href: to(c),
          bad: c.status === "failed",
          after_ms: Date.parse(c.started_at!) - begin,
          duration_ms: took(c.started_at, c.ended_at)!,
        }))} />
    </Section>
  );
}
