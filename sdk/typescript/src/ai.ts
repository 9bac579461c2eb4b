/** Tools for the AI SDK: import them from @bullpen/client/ai. */
import { jsonSchema, type Tool, tool } from "ai";

import type { Bullpen } from "./client.ts";
import type { Context } from "./contexts.ts";
import type { CellResult, Display, ExecuteRequest, Result } from "./types.ts";

/** The most characters of an output that a model gets: the first and the last half of them. */
const maxOutput = 20_000;

/** Pictures that models can see. */
const pictures = ["image/png", "image/jpeg"];

const inputSchema = jsonSchema<{ code: string }>({
  type: "object",
  properties: { code: { type: "string", description: "The program." } },
  required: ["code"],
  additionalProperties: false,
});

type CodeTool<Output> = Tool<{ code: string }, Output>;

/** What a tool says instead of its own description. */
interface Described {
  description?: string;
}

/**
 * Returns a tool that runs each program of a model on its own, in a sandbox. The options are fields of the requests, such
 * as language, timeout, profile, or a thread_id for files that stay. Python programs show the model their figures, too.
 */
export function codeTool(
  bullpen: Pick<Bullpen, "run">,
  options: Omit<ExecuteRequest, "code"> & Described = {},
): CodeTool<Result> {
  const { description, ...request } = options;
  const language = request.language ?? "python";
  return tool({
    description: description ??
      `Runs a ${language} program in a sandbox and returns what it prints. Programs share no variables` +
        (request.thread_id ? ", but files in the working directory stay." : " and no files."),
    inputSchema,
    execute: ({ code }, { abortSignal }) =>
      bullpen.run({ rich: language === "python", ...request, code }, { signal: abortSignal }),
    toModelOutput: ({ output }) => content(output, ended(output)),
  });
}

/** Returns a tool that runs the code of a model in an interpreter that keeps its variables. */
export function contextTool(context: Context, options: Described = {}): CodeTool<CellResult> {
  const { description } = options;
  return tool({
    description: description ??
      `Runs ${context.info.language} code in an interpreter that keeps variables, imports and files between calls. ` +
        `Returns what the code prints, the value of its last expression, and pictures.`,
    inputSchema,
    execute: async ({ code }, { abortSignal }) => {
      try {
        return await context.run(code, { signal: abortSignal });
      } catch (error) {
        if (abortSignal?.aborted) await context.interrupt();
        throw error;
      }
    },
    toModelOutput: ({ output }) => content(output, output.error?.traceback.join("\n") ?? problem(output)),
  });
}

/** Says how a program ended, unless it succeeded. */
function ended(result: Result): string {
  if (result.error !== null) return result.error_message ?? result.error;
  return result.success ? "" : `exit code ${result.exit_code}`;
}

/** Says why a cell did not end by itself. */
function problem(result: CellResult): string {
  return result.status === "ok" ? "" : (result.message ?? result.status);
}

type Output = { stdout: string; stderr: string; results?: Display[] };
type Part = { type: "text"; text: string } | {
  type: "file";
  mediaType: string;
  data: { type: "data"; data: string };
};

/** Returns what a model gets of a result. */
function content({ stdout, stderr, results = [] }: Output, end: string): { type: "content"; value: Part[] } {
  const values = results.map(({ data }) => data["text/plain"]).filter((text) => typeof text === "string");
  const sections = { stdout, stderr, result: values.join("\n"), end };
  const given = Object.entries(sections).filter(([, text]) => text !== "");
  const text = given.map(([name, text]) => `<${name}>\n${shortened(text)}\n</${name}>`).join("\n");
  const shown = results.flatMap(({ data }): Part[] => {
    const mediaType = pictures.find((type) => typeof data[type] === "string");
    if (!mediaType) return [];
    return [{ type: "file", mediaType, data: { type: "data", data: data[mediaType] as string } }];
  });
  return { type: "content", value: [{ type: "text", text: text || "The program printed nothing." }, ...shown] };
}

function shortened(text: string): string {
  if (text.length <= maxOutput) return text;
  const half = maxOutput / 2;
  return `${text.slice(0, half)}\n[${text.length - maxOutput} characters are left out here]\n${text.slice(-half)}`;
}
