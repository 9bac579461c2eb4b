/** The bodies of requests and answers, with the names that they have on the wire. */
import type { components } from "./schema.ts";

export type Schemas = components["schemas"];

export type ExecuteRequest = Schemas["ExecuteRequest"];
export type Result = Schemas["Result"] & {
  /** The id of the execution. */
  trace_id: string;
};
export type Accepted = Schemas["Accepted"];
export type Execution = Schemas["Execution"];
export type ListedExecution = Schemas["ListedExecution"];
export type Cancelled = Schemas["Cancelled"];
export type Display = Schemas["Display"];
/** What a stream of an execution has, the result last. */
export type Event =
  | Schemas["StatusEvent"]
  | Schemas["OutputEvent"]
  | Schemas["DisplayEvent"]
  | Schemas["ResultEvent"];

export type Batch = Schemas["Batch"];
export type BatchRequest = Schemas["BatchRequest"];
export type BatchItem = Schemas["BatchItemRequest"];
export type BatchResult = Schemas["BatchResult"];

export type Thread = Schemas["Thread"];
export type WholeThread = Schemas["WholeThread"];

export type File = Schemas["File"];
export type ChangedFile = Schemas["ChangedFile"];
export type SignedURL = Schemas["SignedURL"];

export type SandboxRequest = Schemas["SandboxRequest"];
export type LiveSandbox = Schemas["LiveSandbox"];
export type SandboxLogs = Schemas["SandboxLogs"];
export type SandboxSave = Schemas["SandboxSave"];

export type ContextRequest = Schemas["ContextRequest"];
export type ContextState = Schemas["Context"];
export type CellRequest = Schemas["CellRequest"];
export type CellResult = Schemas["CellResult"];
export type CellError = Schemas["CellError"];

export type Schedule = Schemas["Schedule"];
export type ScheduleRequest = Schemas["ScheduleRequest"];
export type WholeSchedule = Schemas["WholeSchedule"];
export type SchedulePreview = Schemas["SchedulePreview"];

export type Pipeline = Schemas["Pipeline"];
export type PipelineRequest = Schemas["PipelineRequest"];
export type WholePipeline = Schemas["WholePipeline"];

/** What can be written to a file. */
export type Data = string | Uint8Array | Blob;

/** Options of every call. */
export interface Options {
  /** Ends the call with the signal's reason. Programs that have started go on. */
  signal?: AbortSignal | undefined;
}
