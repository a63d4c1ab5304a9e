"""The page at `/`: the served models, and a form to try each. It loads nothing from other hosts."""

from html import escape
from string import Template

from laconic import __version__
from laconic.artifacts.verdict import Verdict
from laconic.units import format_bytes
from serve.kserve import describe_tensor
from serve.model import Model
from serve.repository import Repository
from serve.wire import to_json

LONGEST_SAMPLE = 2000
"""Characters. A larger example is left out of the form."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Laconic: $names</title>
<style>
:root { color-scheme: light dark; --line: #8884; --accent: #0a7c78; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
section { border: 1px solid var(--line); border-radius: .5rem; padding: 1rem 1.25rem; margin: 1.5rem 0; }
h1, h2 { margin: 0 0 .5rem; } table { border-collapse: collapse; width: 100%; } th { text-align: left; }
th, td { padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
textarea { width: 100%; box-sizing: border-box; min-height: 6rem; } textarea, pre, code { font: 14px/1.4 monospace; }
label { display: block; margin: 1rem 0 .25rem; font-weight: 600; }
button { font: inherit; padding: .35rem 1rem; margin-top: .5rem; background: var(--accent); color: #fff; border: 0;
  border-radius: .3rem; cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 20rem; overflow: auto; }
</style>
<h1>Laconic</h1>
<p>Version $version. <a href="openapi.json">OpenAPI</a>, <a href="metrics">metrics</a>,
<a href="v2/models/stats">statistics</a>.</p>
$models
<script>
for (const form of document.forms) form.addEventListener("submit", async event => {
  event.preventDefault();
  const output = form.querySelector("output"), file = form.querySelector("input[type=file]");
  const body = file ? new FormData(form) : form.elements.body.value;
  const started = performance.now();
  output.textContent = "...";
  try {
    const answer = await fetch(form.getAttribute("action"), { method: "POST", body });
    const text = await answer.text(), time = (performance.now() - started).toFixed(1);
    const shown = text.length > 4000 ? text.slice(0, 4000) + "..." : text;
    output.textContent = answer.status + " in " + time + " ms\\n" + shown;
  } catch (error) { output.textContent = String(error); }
});
</script>
</html>
""")

MODEL = Template("""<section>
<h2>$name</h2>
<table>
<tr><th>Task</th><td>$task</td></tr>
<tr><th>Inputs</th><td>$inputs</td></tr>
<tr><th>Outputs</th><td>$outputs</td></tr>
<tr><th>Engine</th><td>$engine, batches of up to $cap rows</td></tr>
<tr><th>Size</th><td>$size</td></tr>
<tr><th>Verdict</th><td>$verdict</td></tr>
</table>
<form action="$action">
$field
<button>Try</button>
<pre><output></output></pre>
</form>
</section>
""")


def render(repository: Repository) -> str:
    """Render the page as HTML."""
    models = list(repository)
    return PAGE.substitute(
        names=escape(", ".join(model.name for model in models)),
        version=escape(__version__),
        models="".join(render_model(model) for model in models),
    )


def render_model(model: Model) -> str:
    """Render one model's section of the page."""
    return MODEL.substitute(
        name=escape(model.name),
        task=escape(model.task.name),
        inputs=", ".join(render_tensor(describe_tensor(spec)) for spec in model.inputs),
        outputs=", ".join(render_tensor(describe_tensor(spec)) for spec in model.outputs),
        engine=escape(model.runtime),
        cap=model.batcher.cap.rows,
        size=format_bytes(model.artifact.size),
        verdict=escape(format_verdict(model.verdict)),
        action=escape(f"v1/models/{model.name}/predict"),
        field=render_field(model),
    )


def render_tensor(tensor: dict[str, object]) -> str:
    """Render a tensor, as `x FP32 [-1, 3]`."""
    return f"<code>{escape(str(tensor['name']))} {tensor['datatype']} {tensor['shape']}</code>"


def render_field(model: Model) -> str:
    """Render the form's control: a file to upload, or JSON with an example in it."""
    field, upload = model.task.field, model.task.upload
    if upload is not None:
        name, accept = escape(field), escape(upload.content_type)
        return f'<label>{name.capitalize()}<br><input type="file" name="{name}" accept="{accept}" required></label>'
    sample = to_json(model.task.example_request()).decode()
    if len(sample) > LONGEST_SAMPLE:
        sample = f'{{"{field}": ...}}'
    return f'<label>Sample<textarea name="body" spellcheck="false">{escape(sample)}</textarea></label>'


def format_verdict(verdict: Verdict | None) -> str:
    """Format the verdict in a few words."""
    if verdict is None:
        return "none: nobody has compared its answers with the original's"
    if not verdict.passed:
        return "not faithful enough: " + "; ".join(verdict.failures)
    told = []
    for whole in verdict.drift[:1]:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in whole.figures.items())
        told.append(f"passed over {whole.samples} samples: {figures}")
    return "; ".join([*(told or ["passed"]), *verdict.out_of_domain])
