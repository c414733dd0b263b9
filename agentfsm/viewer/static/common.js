/**
 * What all pages share: asking the server, building elements, and showing what it said.
 *
 * Nothing here or in a page makes markup of a text: elements are built one by one, and only fragments and pictures of
 * the server, in which everything is escaped, go through `markup`.
 */

const BASE = new URL('..', import.meta.url);

/** The address of a page or a question, with its parameters; those that are empty are left out. */
export function address(path, parameters = {}) {
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(parameters))
    if (value !== '' && value !== null && value !== undefined) url.searchParams.set(name, value);
  return url.href;
}

/** The address of a run's page, or of one of its records there. */
export const runAddress = (id, seq) => address('run', {id}) + (seq ? `#record-${seq}` : '');

export class ApiError extends Error {
  constructor(message, status, data = {}) {
    super(message);
    Object.assign(this, {status, data});
  }
}

async function read(answer) {
  if (answer.ok) return answer;
  const data = await answer.json().catch(() => ({}));
  throw new ApiError(data.error ?? `the viewer answered ${answer.status}`, answer.status, data);
}

async function ask(path, parameters, options) {
  try {
    return await read(await fetch(address(`api/${path}`, parameters), options));
  } catch (error) {
    if (error instanceof TypeError) throw new ApiError('the viewer cannot be reached', 0);
    throw error;
  }
}

/** What the server says to a question, as JSON. */
export const get = async (path, parameters, options) => (await ask(path, parameters, options)).json();

/** What the server says to a question, as text. */
export const getText = async (path, parameters) => (await ask(path, parameters)).text();

let asking;

/** Who the visitor is: `actor`, `only_run` and the token for changes. */
export const session = (anew = false) => (asking = anew || !asking ? get('session') : asking);

/** Change something; the server's answer. A token that is too old is fetched anew, once. */
export async function post(path, body) {
  const send = async (anew) =>
    ask(path, {}, {
      method: 'POST',
      headers: {'content-type': 'application/json', 'x-agentfsm-token': (await session(anew)).token},
      body: JSON.stringify(body),
    });
  try {
    return await (await send(false)).json();
  } catch (error) {
    if (error.status !== 403 || !error.message.includes('too old')) throw error;
    return (await send(true)).json();
  }
}

/**
 * Follow what the server tells, while the page is in sight: a browser has few connections for all its tabs.
 *
 * `lost` says whether the server cannot be reached now. What was told before is told again after a break.
 */
export function follow(path, parameters, told, lost = () => {}) {
  let source = null;
  const watch = () => {
    source?.close();
    source = null;
    if (document.hidden) return;
    source = new EventSource(address(`api/${path}`, parameters));
    source.onmessage = (message) => told(JSON.parse(message.data));
    source.onopen = () => lost(false);
    source.onerror = () => lost(true);
  };
  document.addEventListener('visibilitychange', watch);
  watch();
  return () => {
    document.removeEventListener('visibilitychange', watch);
    source?.close();
  };
}

/** An element with properties and children; a text becomes a text, `data` and `aria` attributes, `class` its class. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (name in made && !name.startsWith('aria') && name !== 'list') made[name] = value;
    else made.setAttribute(name === 'className' ? 'class' : name, value === true ? '' : value);
  }
  made.append(...children.flat().filter((each) => each !== null && each !== undefined && each !== false && each !== ''));
  return made;
}

/** Somebody else's text, on one line or wrapped, whose direction stays inside. */
export const said = (text) => el('span', {className: 'said', dir: 'auto'}, String(text));

/** Somebody else's text with its line breaks. */
export const block = (text) =>
  text === '' || text === null || text === undefined ? null : isRedacted(text) ? redacted()
    : pre(String(text), [String(text)]);

/** Text with its line breaks; one that may be longer than its box can be scrolled with the keyboard. */
function pre(text, content) {
  const lines = text.split('\n').reduce((sum, line) => sum + 1 + Math.floor(line.length / 40), 0);
  return el('pre', {className: 'said', dir: 'auto', tabIndex: lines > 20 ? 0 : undefined}, content);
}

export const isRedacted = (value) => typeof value === 'object' && value !== null && value.redacted === true;
export const redacted = () => el('em', {className: 'redacted', title: 'This was deleted from the store for good.'}, 'redacted');

/** A JSON value as text, laid out over lines, with what was redacted marked. */
export function json(value) {
  if (value === null || value === undefined) return null;
  if (isRedacted(value)) return redacted();
  const text = JSON.stringify(value, (_, each) => (isRedacted(each) ? '\u0000redacted\u0000' : each), 1);
  return pre(text, text.split('"\\u0000redacted\\u0000"').flatMap((part, place) => (place ? [redacted(), part] : [part])));
}

/** Names and their values, as a list; empty values are left out. In `columns`, each pair stays together. */
export function facts(pairs, columns = false) {
  const there = pairs.filter(([, value]) => value !== null && value !== undefined && value !== '');
  const items = there.map(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]);
  return el('dl', {className: columns ? 'columns' : undefined}, columns ? items.map((pair) => el('div', {}, pair)) : items.flat());
}

/** A time in UTC, to the second, as everywhere in reports. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return '';
  const at = new Date(seconds * 1000);
  if (Number.isNaN(at.getTime())) return `${seconds} s`;
  const text = at.toISOString();
  return el('time', {dateTime: text, title: at.toLocaleString()}, `${text.slice(0, 10)} ${text.slice(11, 19)}`);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return '';
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 100 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${(seconds / 3600).toFixed(1)} h`;
}

export const money = (usd) => (usd === null || usd === undefined ? '' : `${usd.toFixed(4)} USD`);
export const words = (name) => String(name).replaceAll('_', ' ');

/** The name of a row, `state.guard -> state`, which breaks between words and not within. */
export const rowName = (text) => el('code', {className: 'said'}, String(text).replace('->', '\u2192').split(/(?<=[._])/).flatMap((part) => [part, el('wbr')]).slice(0, -1));

/** So many of something. */
export const counted = (number, word) => `${number.toLocaleString('en')} ${word}${number === 1 ? '' : 's'}`;

/** What a run cost; an empty text if its model said neither a price nor tokens. */
export const spent = ({cost, tokens}) => (cost ? `${money(cost)}, ${counted(tokens ?? 0, 'token')}` : tokens ? `${counted(tokens, 'token')} without a price` : '');

/** How a run ends, in words: the name of its last event. */
export const endingName = (name) => ({RunCompleted: 'completed', Handoff: 'handed off', PartialRunSummary: 'partial', RunCancelled: 'cancelled', RunAborted: 'aborted',
  UserInputRequested: 'waits for a person'})[name] ?? (words(name.replaceAll(/(?<!^)([A-Z])/g, ' $1').toLowerCase()) || 'not known');

const VERDICTS = {0: 'good', 1: 'bad', 3: 'open', 4: 'good'};

/** What a verification found, as a badge; its words say what its color says. */
export const verdictBadge = (report) => el('span', {className: `badge ${VERDICTS[report.code] ?? 'open'}`}, report.verdict);

/** The same with what is wrong, the keys, and what was not checked. */
export const verdict = (id, {keys, unchecked, ...report}) => [verdictBadge(report), ' ',
  report.seq === null ? '' : el('a', {href: runAddress(id, report.seq)}, `record ${report.seq}`), report.seq === null ? '' : ': ', report.reason && [said(report.reason), '; '],
  keys.length ? ['sealed under key ', el('code', {}, said(keys.join(', ')))] : '', unchecked.length ? ['. Not checked ', said(unchecked.join('; ')), ' ', el('a', {href: address('verification')}, '(verification)')] : ''].flat();

/** The status of a run as a badge: it says in words what its color says. */
export function statusBadge(run) {
  const waiting = run.status === 'suspended';
  const text = run.ending ? words(run.ending) : run.aside ? 'set aside' : waiting ? 'waiting' : run.interrupted ? 'interrupted' : run.status;
  const kind = run.ending === 'completed' ? 'good' : run.ending || run.interrupted || run.aside ? 'bad' : waiting ? 'open' : 'busy';
  return el('span', {className: `badge ${kind}`}, text);
}

/** Why workers have set a run aside, and what ends that; nothing if they have not. */
export const whyAside = ({id, aside}, before = '') => aside && [said(`${before}${aside.reason};`),
  ...(aside.until === null ? [' to try it again: ', el('code', {className: 'said'}, `agentfsm worker --put-back ${id}`)] : [' it is tried again at ', time(aside.until)])];

/** Tell something, also to those who do not see the page. */
export function notice(text, kind = 'info') {
  const line = el('p', {className: `notice ${kind}`}, said(text));
  line.append(el('button', {type: 'button', 'aria-label': 'Dismiss', onclick: () => line.remove()}, '\u00d7'));
  document.querySelector('#notices').append(line);
  if (kind === 'info') setTimeout(() => line.remove(), 8000);
}

const policy = window.trustedTypes?.createPolicy('agentfsm', {createHTML: (text) => text});

/** Elements of a fragment or a picture of the server. Scripts in it would not run. */
export function markup(text, type = 'text/html') {
  const parsed = new DOMParser().parseFromString(policy ? policy.createHTML(text) : text, type);
  return type === 'text/html' ? [...parsed.body.childNodes].map((node) => document.adoptNode(node))
    : [document.adoptNode(parsed.documentElement)];
}

/** Say who the visitor is, in the head of the page. */
export async function showPerson() {
  const {actor, only_run: only} = await session();
  const person = document.querySelector('#person');
  if (actor === null) person.textContent = 'read-only: nobody is signed in';
  else person.replaceChildren(said(actor.id), actor.roles.length ? ` (${actor.roles.join(', ')})` : '', only ? ', for one run' : '');
}

/** Run a page's code, and tell what goes wrong. */
export async function start(page) {
  try {
    await Promise.all([showPerson(), page(document.querySelector('main'))]);
  } catch (error) {
    document.querySelector('main').append(el('p', {className: 'failed', role: 'alert'}, said(error.message)));
    if (!(error instanceof ApiError)) throw error;
  }
}
