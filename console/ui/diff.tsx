import { visible } from "./text.tsx";

const classes: Record<string, string> = { "+": "added", "-": "removed", "@": "hunk" };

// Diff shows a difference in the unified format.
export function Diff({ of }: { of: string }) {
  return (
    <pre class="file diff" tabIndex={0}>
      {of.replace(/\r?\n$/, "").split(/\r?\n/).map((line, i) => (
        <span key={i} class={/^(\+\+\+|---) /.test(line) ? "hunk" : classes[line[0]] ?? ""}>{visible(line) + "\n"}</span>
      ))}
    </pre>
  );
}
