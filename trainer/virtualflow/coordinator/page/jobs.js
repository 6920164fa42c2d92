// The page of all jobs, each a link to its live page; the plugin opens the way there when the link is followed.

const HOW = "Open the address that kubectl vf ui has printed: it bears the token of this page.";
const REST = 1000, OPENING = 60000;
let seen = null;

// A link that also works in a tab of its own, which knows nothing of this one.
function linkTo(job) {
  return `#${new URLSearchParams({token: sessionStorage.getItem("token"), open: `${job.namespace}/${job.name}`})}`;
}

function row() {
  const text = (name) => make("td", {"data-head": name}, make("span", {}));
  return make(
    "tr", {}, make("th", {scope: "row"}, make("a", {}), make("small", {})),
    make("td", {"data-head": "phase"}, make("span", {})),
    make("td", {"data-head": "progress"}, make("span", {}), make("i", {class: "part", "aria-hidden": "true"}, make("i", {}))),
    make("td", {class: "number", "data-head": "goodput"}, make("span", {})),
    text("workers"), text("queue"), make("td", {"data-head": "in its way"}, make("span", {}), make("small", {})), text("last change"),
  );
}

function fill(line, job) {
  const [name, phase, progress, goodput, workers, queue, way, change] = line.children;
  const link = name.children[0];
  write(link, job.name);
  if (job.page) set(link, "href", linkTo(job));
  else link.removeAttribute("href");
  set(link, "title", job.page ? "Open its live page" : "It has no live page: no coordinator runs");
  write(name.children[1], seen.namespaces ? job.namespace : "");
  write(phase.children[0], job.phase);
  set(phase.children[0], "class", `phase ${job.phase.toLowerCase()}`);
  write(progress.children[0], job.progress);
  progress.children[1].hidden = job.done === null;
  progress.children[1].firstElementChild.style.width = `${100 * (job.done ?? 0)}%`;
  const words = [[goodput, job.goodput], [workers, job.workers], [queue, job.queue], [way, job.why], [change, job.change]];
  for (const [cell, said] of words) {
    write(cell.children[0], said);
    cell.classList.toggle("empty", !said);
  }
  write(way.children[1], job.advice ? `To do: ${job.advice}` : "");
  progress.classList.toggle("empty", !job.progress);
}

function list() {
  const words = find("words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (job) => [job.namespace, job.name, job.phase, job.queue, job.why].join(" ").toLowerCase();
  const jobs = seen.jobs.filter((job) => words.every((word) => text(job).includes(word)));
  fit(find("jobs"), jobs, row, fill);
  find("list").hidden = !jobs.length;
  find("none").hidden = jobs.length > 0;
  write(find("none"), seen.jobs.length ? "None of them is like that." : `There are no jobs in ${seen.namespaces ? "any namespace" : seen.where}.`);
}

function show(told) {
  seen = told;
  find("all").hidden = false;
  write(find("counted"), told.counted);
  list();
  write(find("foot"), `As of ${moment(told.time, told.time)}. Read only. kubectl vf why JOB says more of what is in a job's way.`);
  document.title = `VirtualFlow: ${told.counted}`;
  return {over: false, trouble: told.trouble, rest: REST};
}

function explain(answer) {
  if (answer === null) return "kubectl vf ui does not answer any more. What you see is the latest that it said.";
  return answer.status === 429 ? "Too many pages look at these jobs; this one tries again." : `kubectl vf ui refuses (${answer.status}).`;
}

// Go to a job's live page; a sentence says why that cannot be.
async function open(job) {
  const refused = find("refused");
  refused.hidden = false;
  write(refused, `Opening the page of ${job} …`);
  const answer = await ask(`v1/page?${new URLSearchParams({job})}`, OPENING);
  if (answer !== null && answer.said && answer.said.address) {
    refused.hidden = true;
    location.assign(answer.said.address);
    return;
  }
  write(refused, answer !== null && answer.said ? answer.said.sentence : explain(answer));
}

find("words").addEventListener("input", () => { if (seen) list(); });
find("jobs").addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  open(new URLSearchParams(link.hash.slice(1)).get("open"));
});
explainWords();
const wanted = takeFragment("token", "open").open;
sessionStorage.removeItem("open");
if (wanted) open(wanted);
follow(() => `v1/jobs?have=${seen ? seen.have : ""}`, show, explain, HOW);
