import { visible } from "./text.tsx";

const classes: Record<string, string> = { "+": "added", "-": "removed", "@": "hunk" };

const maxColoured = 10_000; // lines with a colour; very many would block the page

// Diff shows a unified diff.
export function Diff({ of }: { of: string }) {
  const lines = of.replace(/\r?\n$/, "").split(/\r?\n/);
  const rest = lines.splice(maxColoured);
  return (
    <pre class="file diff" tabIndex={0}>
      {lines.map((line, i) => (
        <span key={i} class={/^(\+\+\+|---) /.test(line) ? "hunk" : classes[line[0]] ?? ""}>{visible(line) + "\n"}</span>
      ))}
      {visible(rest.join("\n"))}
    </pre>
  );
}

const maxCells = 4_000_000; // limit of the comparison's table, beyond which whole texts count as different

// Difference shows the lines that differ between two texts.
export function Difference({ before, after }: { before: string; after: string }) {
  return <Diff of={compare(lines(before), lines(after)).map(([sign, line]) => sign + line).join("\n")} />;
}

const lines = (text: string) => text ? text.split("\n") : [];

// compare returns the lines of both texts with the signs -, + and blank. It finds the longest common subsequence.
export function compare(a: string[], b: string[]): Array<["-" | "+" | " ", string]> {
  if (a.length * b.length > maxCells) {
    return [...a.map((l): ["-", string] => ["-", l]), ...b.map((l): ["+", string] => ["+", l])];
  }
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width); // of the lines from i and j on
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i * width + j] = a[i] === b[j]
        ? common[(i + 1) * width + j + 1] + 1
        : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const found: Array<["-" | "+" | " ", string]> = [];
  for (let i = 0, j = 0; i < a.length || j < b.length;) {
    if (i < a.length && j < b.length && a[i] === b[j]) found.push([" ", a[i]]), i++, j++;
    else if (j === b.length || i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1]) {
      found.push(["-", a[i++]]);
    } else found.push(["+", b[j++]]);
  }
  return found;
}
