/** The base of all errors of this package. Failing programs are no errors, but results. */
export class BullpenError extends Error {
  constructor(message: string, options?: { cause?: unknown }) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** What an answer with an error status says. */
export interface ErrorDetails {
  status: number;
  code: string;
  message: string;
  reason?: string | undefined;
  trace_id?: string | undefined;
  request_id?: string | undefined;
  retry_after?: number | undefined;
  permanent?: boolean | undefined;
}

/** An answer with an error status. There is a subclass for each code that programs tell apart. */
export class APIError extends BullpenError {
  /** The HTTP status. */
  readonly status: number;
  /** Of the API, such as validation_error; empty if something other than bullpen answered. */
  readonly code: string;
  /** Distinguishes errors of the same code. */
  readonly reason: string | undefined;
  /** Of the execution, if the request is about one. */
  readonly trace_id: string | undefined;
  /** Of the request, as the server's log has it. */
  readonly request_id: string | undefined;
  /** Seconds after which the server wants to be asked again. */
  readonly retry_after: number | undefined;
  /** Whether the same request will be refused until somebody changes something. */
  readonly permanent: boolean;

  constructor(details: ErrorDetails) {
    const about = [`HTTP ${details.status}`, details.code, details.trace_id, details.request_id].filter(Boolean);
    super(`${details.message} (${about.join(", ")})`);
    this.status = details.status;
    this.code = details.code;
    this.reason = details.reason;
    this.trace_id = details.trace_id;
    this.request_id = details.request_id;
    this.retry_after = details.retry_after;
    this.permanent = details.permanent ?? false;
  }
}

/** The request is not valid; the message names the field. */
export class BadRequestError extends APIError {}
/** The API key is missing or not valid. */
export class AuthenticationError extends APIError {}
/** The API key may not do this. */
export class PermissionDeniedError extends APIError {}
/** The API key's organisation has nothing with this id. */
export class NotFoundError extends APIError {}
/** Something else holds or has changed what the request needs, such as a thread that another execution uses. */
export class ConflictError extends APIError {}
/** The memory of a context is gone. Restart the context. */
export class ContextLostError extends APIError {}
/** The idempotency key was used with another request. */
export class IdempotencyMismatchError extends APIError {}
/** A limit is reached. It ends by waiting if retry_after is set. */
export class RateLimitError extends APIError {}
/**
 * A failure of the server, or nothing can run the program now. With the code gateway_timeout the program runs on:
 * `wait(error.trace_id)` returns its result.
 */
export class ServerError extends APIError {}

const classes: Record<string, typeof APIError> = {
  validation_error: BadRequestError,
  length_required: BadRequestError,
  payload_too_large: BadRequestError,
  unsupported_media_type: BadRequestError,
  method_not_allowed: BadRequestError,
  range_not_satisfiable: BadRequestError,
  unauthorized: AuthenticationError,
  forbidden: PermissionDeniedError,
  not_found: NotFoundError,
  conflict: ConflictError,
  precondition_failed: ConflictError,
  context_lost: ContextLostError,
  idempotency_mismatch: IdempotencyMismatchError,
  rate_limited: RateLimitError,
};

/** Returns the error of an answer, of the class for its code. */
export function errorOf(details: ErrorDetails): APIError {
  const Class = classes[details.code] ?? (details.status >= 500 ? ServerError : APIError);
  return new Class(details);
}

/** An error of the program in a live sandbox that starts commands and serves files. */
export class GuestError extends BullpenError {
  /** The code of the Connect protocol, such as not_found. */
  readonly code: string;

  constructor(code: string, message: string) {
    super(`${message} (${code})`);
    this.code = code;
  }
}

/** The connection broke, and the request could not be repeated until it was answered. */
export class ConnectionError extends BullpenError {}

/** No connection to the server could be made. It has not received the request. */
export class UnreachableError extends ConnectionError {}

/** The connection broke before the answer of a request that must not be repeated. The server may have carried it out. */
export class UnknownOutcomeError extends ConnectionError {}

/** The server was lost while an execution was followed. It may go on: `follow(trace_id, { after_seq })` reads the rest. */
export class LostError extends ConnectionError {
  readonly trace_id: string;
  /** The number of the last event that was returned. */
  readonly after_seq: number;

  constructor(trace_id: string, after_seq: number, cause: unknown) {
    super(`lost the server while following ${trace_id} after event ${after_seq}: ${messageOf(cause)}`, { cause });
    this.trace_id = trace_id;
    this.after_seq = after_seq;
  }
}

/** The signature of a webhook is not valid, or the webhook is too old. */
export class WebhookVerificationError extends BullpenError {}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
