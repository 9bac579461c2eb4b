import { call } from "../api/client.ts";
import type { PipelineRequest } from "../api/schema.ts";
import { navigate, path } from "../app/router.ts";
import { Form } from "../ui/form.tsx";

const example = `name: build and test
steps:
  - name: build
    run: echo building > out.txt
    artifacts:
      out: [out.txt]
  - name: test
    matrix:
      level: ["1", "2"]
    run: grep building out.txt
`;

// NewPipeline starts a run of a file. Errors name the line of the file.
export function NewPipeline() {
  return (
    <Form
      schema="PipelineRequest"
      fields={["file", "thread_id"]}
      more={["branch", "commit", "secrets"]}
      code="yaml"
      value={{ file: example }}
      label="Run"
      submit={async (v) =>
        navigate(path("pipelines", (await call("createPipeline", { body: v as PipelineRequest })).id))} />
  );
}
