/** Runs untrusted code on a bullpen server. */
export { Bullpen, type SubmitOptions } from "./client.ts";
export type { Config } from "./http.ts";
export { collect } from "./http.ts";
export {
  APIError,
  AuthenticationError,
  BadRequestError,
  BullpenError,
  ConflictError,
  ConnectionError,
  ContextLostError,
  GuestError,
  IdempotencyMismatchError,
  LostError,
  NotFoundError,
  PermissionDeniedError,
  RateLimitError,
  ServerError,
  UnknownOutcomeError,
  UnreachableError,
  WebhookVerificationError,
} from "./errors.ts";
export * as webhooks from "./webhooks.ts";
export type { WebhookEvent } from "./webhooks.ts";
export type { Batches, MapOptions } from "./batches.ts";
export type { CommandOptions, CommandResult, Commands } from "./commands.ts";
export type { CellEvent, Context, Contexts } from "./contexts.ts";
export type { ExecutionFilter, Executions } from "./executions.ts";
export type { Files, FilesAt } from "./files.ts";
export type { SandboxEntry, SandboxFiles } from "./guest.ts";
export type { Pipelines } from "./pipelines.ts";
export type { Sandbox, Sandboxes } from "./sandboxes.ts";
export type { Schedules } from "./schedules.ts";
export type { Threads } from "./threads.ts";
export type {
  AgentEvent,
  AgentMessage,
  AgentPermission,
  AgentQuestion,
  AgentSession,
  AgentSessionRequest,
  AgentSessions,
} from "./agentsessions.ts";
export type * from "./types.ts";
