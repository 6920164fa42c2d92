// Asking the server that a page is from, again and again, for what the page shows. The token comes in the part of the
// address that browsers keep to themselves, and stays in this tab.

const PATIENCE = 15000, FIRST_RETRY = 1000, LAST_RETRY = 15000;

function complain(sentence) {
  const trouble = find("trouble");
  trouble.hidden = !sentence;
  write(trouble, sentence);
}

const sleep = (time) => new Promise((wake) => { setTimeout(wake, time); });

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((wake) => { document.addEventListener("visibilitychange", wake, {once: true}); });
}

// What the address says behind its "#", or has said: the first of the names is the token, without which it says nothing.
function takeFragment(...names) {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.get(names[0])) {
    for (const name of names) sessionStorage.setItem(name, given.get(name) || "");
    history.replaceState(null, "", location.pathname);
  }
  return Object.fromEntries(names.map((name) => [name, sessionStorage.getItem(name) || ""]));
}

// The answer; null: nobody answers.
async function get(address, patience = PATIENCE) {
  const headers = {Authorization: `Bearer ${sessionStorage.getItem("token")}`};
  try {
    return await fetch(address, {headers, cache: "no-store", signal: AbortSignal.timeout(patience)});
  } catch {
    return null;
  }
}

// The status of the answer, and what it says; null: nobody answers.
async function ask(address, patience) {
  const answer = await get(address, patience);
  try {
    return answer && {status: answer.status, said: answer.ok ? await answer.json() : null};
  } catch {
    return null;
  }
}

// Show what the server says until it is over, resting between two answers; what goes wrong meanwhile is explained.
async function follow(path, show, explain, how) {
  if (!sessionStorage.getItem("token")) {
    complain(`This page has no token. ${how}`);
    return;
  }
  let retry = FIRST_RETRY;
  for (;;) {
    await visible();
    const answer = await ask(path());
    if (answer !== null && answer.said) {
      const {over, trouble, rest} = show(answer.said);
      complain(trouble);
      if (over) return;
      if (rest) await sleep(rest);
      retry = FIRST_RETRY;
    } else if (answer !== null && (answer.status === 401 || answer.status === 403)) {
      sessionStorage.removeItem("token");
      complain(`The token is wrong. ${how}`);
      return;
    } else {
      complain(explain(answer));
      await sleep(retry);
      retry = Math.min(2 * retry, LAST_RETRY);
    }
  }
}

window.addEventListener("hashchange", () => { if (location.hash.includes("token=")) location.reload(); });
