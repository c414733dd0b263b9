/** What waits for a person: exact arguments, votes and deadline, and the answer. */

import {fieldsOf} from './answer_form.js';
import {block, el, facts, follow, isRedacted, json, notice, post, redacted, runAddress, said, session, start, statusBadge, time, words} from './common.js';

const only = new URLSearchParams(location.search).get('run') ?? '';
const UNITS = {model_calls: 'model calls', seconds: 'seconds', tokens: 'tokens', usd: 'USD'};

const person = (actor) => [said(actor.id), actor.roles.length ? ` (${actor.roles.join(', ')})` : '', actor.verified ? '' : ', claimed, not verified'];

/** One request of a run. */
class Card {
  #open = null; // the form that somebody has opened
  #sending = false;
  #done = false;

  constructor(request, me) {
    Object.assign(this, {request, me});
    this.status = el('div', {role: 'status'});
    this.votes = el('div', {});
    this.form = el('div', {className: 'form'});
    this.buttons = el('div', {className: 'buttons'});
    const {run} = request, kind = words(request.kind)[0].toUpperCase() + words(request.kind).slice(1);
    this.element = el('article', {className: 'card', 'data-run': run.id, 'aria-label': `${words(request.kind)} ${request.tool || ''} of run ${run.id}`},
      el('h2', {}, kind, request.tool ? [': ', said(request.tool)] : ''), el('p', {className: 'note'}, 'Run ', el('a', {href: runAddress(run.id, request.seq)}, said(run.prompt || run.id)), ' ', el('code', {}, run.id)),
      this.#question(), this.votes, this.status, this.form, this.buttons);
    this.update(request);
  }

  #question() {
    const {request} = this, {run} = request, shown = request.arguments;
    const names = isRedacted(shown) ? [] : Object.keys(shown);
    return el('div', {},
      isRedacted(request.question) ? redacted() : el('div', {className: 'question'}, block(request.question)), block(request.context),
      request.tool && (names.length || request.kind !== 'question') ? [el('h3', {}, 'Exactly these arguments'), isRedacted(shown) ? redacted() : names.length
        ? el('dl', {className: 'arguments'}, names.flatMap((name) => [el('dt', {}, said(name)), el('dd', {}, typeof shown[name] === 'string' ? block(shown[name]) ?? '(empty)' : json(shown[name]) ?? 'null')]))
        : el('p', {}, 'none')] : '',
      facts([
        ['Requested by', run.actor ? said(run.actor) : request.quorum?.requester ? person(request.quorum.requester) : ''],
        ['Asked by', request.asker && said(request.asker)],
        ['Limit', request.limit && `${request.limit.spent} of ${request.limit.limit} ${UNITS[request.limit.unit]} are used up${request.limit.default ? `; an answer grants ${request.limit.default}` : ''}`],
        ['Waits since', time(run.updated)],
        ['Until', request.expires ? [time(request.expires), request.expired ? ' (expired)' : ''] : ''],
        ['Digest', el('code', {title: request.digest}, request.digest.slice(0, 12))],
      ]));
  }

  /** Show what is new about the request, and keep what somebody is filling in. */
  update(request) {
    this.request = request;
    const {quorum} = request;
    this.votes.replaceChildren(...(quorum ? [el('p', {}, `${quorum.needed - quorum.missing} of ${quorum.needed} approvals`,
      quorum.roles.length ? ` by ${quorum.roles.join(' or ')}` : '', quorum.not_requester ? ', not by the requester' : '',
      quorum.escalates_at ? [', later also by ', quorum.escalate_to.join(' or '), ' (from ', time(quorum.escalates_at), ')'] : '',
      quorum.votes.length ? ':' : ''), quorum.votes.length ? el('ul', {}, quorum.votes.map((actor) => el('li', {}, 'approved by ', person(actor)))) : ''] : []),
    ...request.sent.map((sent) => sent.refused
      ? el('p', {className: 'notice error', role: 'alert'}, 'The last answer, by ', sent.by ? person(sent.by) : 'somebody', ` (${words(sent.reply)}), was refused `, time(sent.at), ': ', said(sent.refused))
      : el('p', {className: 'sent'}, sent.by ? person(sent.by) : 'Somebody', sent.kind === 'cancel' ? ' cancelled the run' : ` answered: ${words(sent.reply)}`, ', ', time(sent.at), '; it waits for a process that has the agent')));
    if (request.sent.some((sent) => sent.refused)) this.#done = false; // the run still asks, and can be answered again
    if (this.#open || this.#done) return;
    const may = (!request.refused || request.may_only_deny) && !request.expired;
    this.status.replaceChildren(...(request.refused ? [el('p', {className: 'note'}, said(request.refused))] : request.expired ? [el('p', {className: 'note'}, 'The request has expired: nobody can answer it any more, and the run can be cancelled.')] : []));
    this.buttons.replaceChildren(...(may ? this.#choices() : []), ...(this.me ? [el('button', {type: 'button', className: 'danger last', onclick: () => this.#ask('Cancel the run', 'Why', (text) => this.#send('inbox/cancel', {run: request.run.id, reason: text}), false, 'danger')}, 'Cancel the run\u2026')] : []));
  }

  #choices() {
    const {request} = this, button = (text, onclick, className = '') => el('button', {type: 'button', className, onclick}, text);
    const reply = (answer) => this.#send('inbox/answer', {run: request.run.id, to: request.digest, reply: answer});
    const ask = (title, label, make, needed = true) => this.#ask(title, label, (text) => reply(make(text)), needed);
    const deny = button('Deny\u2026', () => ask('Deny', 'Why, for the model', (text) => ({kind: 'deny', text}), false));
    switch (request.kind) {
      case 'approval':
        return request.may_only_deny ? [deny] : [
          button('Allow', () => reply({kind: 'allow'}), 'main'),
          deny,
          (request.quorum?.needed ?? 1) > 1 ? '' : button('Edit\u2026', () => this.#edit((fields) => reply({kind: 'edit', fields})))].filter(Boolean);
      case 'in_doubt':
        return [
          button('It ran\u2026', () => ask('It ran', 'Its result, for the model', (text) => ({kind: 'ran', text}), false), 'main'),
          button('It did not run: run it', () => reply({kind: 'did_not_run'})), button('Nobody knows: go on without it', () => reply({kind: 'give_up'}))];
      case 'form':
        return [
          button('Fill in\u2026', () => this.#fill((fields) => reply({kind: 'fill', fields})), 'main'),
          button('Decline\u2026', () => ask('Decline', 'Why', (text) => ({kind: 'deny', text}), false)), button('Cancel the form', () => reply({kind: 'give_up'}))];
      case 'limit':
        return [button('Go on\u2026', () => request.limit?.default === 0
          ? ask('Go on', 'What the model is told', (text) => ({kind: 'text', text: text || 'Go on.'}), false) : this.#extend(reply), 'main')];
      default:
        return [...(Array.isArray(request.choices) ? request.choices : []).map((choice) => button(choice, () => reply({kind: 'text', text: choice}))),
          button('Answer\u2026', () => ask('Answer', 'Your answer', (text) => ({kind: 'text', text})), 'main')];
    }
  }

  /** Open a form in the place of the buttons. */
  #show(title, content, send, style = 'main') {
    this.#open = el('form', {'aria-label': title, onsubmit: (event) => { event.preventDefault(); send(); }}, el('h3', {}, title), ...content,
      el('div', {className: 'buttons'}, el('button', {type: 'submit', className: style}, title), el('button', {type: 'button', onclick: () => this.#close()}, 'Back')));
    this.form.replaceChildren(this.#open);
    this.buttons.hidden = true;
  }

  #close() {
    this.#open = null;
    this.form.replaceChildren();
    this.buttons.hidden = false;
    this.update(this.request);
    this.buttons.querySelector('button')?.focus();
  }

  #ask(title, label, send, needed, style) {
    const text = el('textarea', {rows: 3, required: needed});
    this.#show(title, [el('label', {className: 'field'}, el('span', {className: 'name'}, label), text)], () => send(text.value), style);
    text.focus();
  }

  #edit(send) {
    const fields = fieldsOf(this.request.schema, this.request.fields);
    const known = this.request.tool_known ? '' : el('p', {className: 'note'}, 'The schema of the tool is not known here; the process that has the agent checks the arguments.');
    this.#show('Allow with these arguments', [known, ...fields.elements], () => {
      if (!fields.check()) return;
      const changed = fields.values(false);
      if (Object.keys(changed).length) send(changed);
      else notice('nothing is changed: use Allow', 'error');
    });
    fields.focus();
  }

  #fill(send) {
    const fields = fieldsOf(this.request.schema, {});
    this.#show('Send', fields.elements, () => { if (fields.check()) send(fields.values(true)); });
    fields.focus();
  }

  #extend(reply) {
    const {unit, default: usual} = this.request.limit ?? {unit: 'tokens', default: ''};
    const amount = el('input', {type: 'text', inputMode: 'decimal', placeholder: String(usual)}), text = el('textarea', {rows: 2});
    this.#show('Go on', [el('label', {className: 'field'}, el('span', {className: 'name'}, `How many ${UNITS[unit]} more (${usual} if empty)`), amount),
      el('label', {className: 'field'}, el('span', {className: 'name'}, 'What the model is told'), text)],
    () => reply(amount.value.trim() ? {kind: 'extend', unit, amount: amount.value.trim(), text: text.value} : {kind: 'text', text: text.value || 'Go on.'}));
    amount.focus();
  }

  async #send(path, body) {
    this.#sending = true;
    this.element.setAttribute('aria-busy', 'true');
    for (const each of this.element.querySelectorAll('button')) each.disabled = true;
    try {
      const {owner, here} = await post(path, body);
      this.#finish(here ? 'Sent; the run goes on.' : owner ? `Sent to ${owner}, which runs it.` : 'Sent. A process that has the agent acts on it.', 'good');
    } catch (error) {
      if (error.status === 409) this.#finish(`Refused, nothing was answered: ${error.message}`, 'error');
      else this.status.replaceChildren(el('p', {className: 'notice error', role: 'alert'}, said(error.message)));
      for (const each of this.element.querySelectorAll('button')) each.disabled = false;
    } finally {
      this.#sending = false;
      this.element.removeAttribute('aria-busy');
    }
  }

  #finish(text, kind) {
    this.#done = true;
    this.#open = null;
    this.form.replaceChildren();
    this.buttons.replaceChildren(el('button', {type: 'button', onclick: () => this.element.remove()}, 'Put away'));
    this.buttons.hidden = false;
    this.status.replaceChildren(el('p', {className: `notice ${kind}`, role: kind === 'error' ? 'alert' : 'status'}, said(text)));
    this.buttons.querySelector('button').focus();
  }

  /** The run does not ask this any more. True if the card can go. */
  outdated() {
    if (this.#done || this.#sending) return false; // what came of an answer is still to be said
    if (!this.#open) return true;
    this.#finish('The run does not ask this any more: it was answered, or asks something else.', 'error');
    return false;
  }
}

await start(async (main) => {
  const {actor} = await session();
  const mine = el('input', {type: 'checkbox', checked: true}), list = el('div', {className: 'cards'}), live = el('p', {className: 'note', role: 'status'});
  const none = el('p', {}, actor ? 'Nothing waits for you.' : 'Nothing waits for a person.');
  main.append(actor ? el('p', {className: 'bar'}, el('label', {}, mine, ' Only what I may answer')) : el('p', {className: 'note'}, 'Nobody is signed in: you see what waits, and cannot answer it.'), live, none, list);
  const cards = new Map();
  let known = [];

  function show(requests) {
    known = requests;
    const wanted = requests.filter((request) => request.problem || !actor || !mine.checked || !request.refused || request.may_only_deny || request.quorum?.votes.some((vote) => vote.id === actor.id));
    const keys = new Set(wanted.map((request) => `${request.run.id} ${request.digest ?? ''}`));
    for (const [key, card] of cards)
      if (!keys.has(key) && (card.outdated?.() ?? true)) {
        card.element.remove();
        cards.delete(key);
      }
    for (const request of wanted) {
      const key = `${request.run.id} ${request.digest ?? ''}`;
      if (request.problem && !cards.has(key)) cards.set(key, {element: el('article', {className: 'card'}, el('h2', {}, 'Run ', said(request.run.id)), statusBadge(request.run), el('p', {}, said(request.problem)))});
      else if (!cards.has(key)) cards.set(key, new Card(request, actor));
      else cards.get(key).update?.(request);
      if (!cards.get(key).element.isConnected) list.append(cards.get(key).element);
    }
    none.hidden = list.childElementCount > 0;
    live.textContent = `${wanted.length} waiting`;
  }

  mine.addEventListener('change', () => show(known));
  follow('inbox/events', {run: only}, ({requests}) => show(requests), (lost) => { if (lost) live.textContent = 'the viewer cannot be reached; trying again'; });
});
