/** A form for the arguments of a call, or for the fields that a run asks for; what is changed is marked. */

import {el, said, words} from './common.js';

const type = (schema) => {
  const own = Array.isArray(schema.type) ? schema.type.find((each) => each !== 'null') : schema.type;
  return own ?? '';
};

/** The kind of a value whose schema is not known. */
const typeOf = (value) => (typeof value === 'boolean' ? 'boolean' : typeof value === 'number' ? 'number' : typeof value === 'string' ? 'string' : '');

/** The part of a schema that a reference leads to. */
const resolve = (schema, root) =>
  schema?.$ref?.startsWith('#/') ? schema.$ref.slice(2).split('/').reduce((at, step) => at?.[step], root) ?? {} : schema ?? {};

/** The kinds of input that browsers have for some formats of texts. */
const INPUTS = {date: 'date', email: 'email', uri: 'url'};

class Field {
  /**
   * @param {string} name Its name.
   * @param {object} schema Its schema; empty if it is not known.
   * @param {string|undefined} before Its value as JSON, or undefined if it has none.
   * @param {boolean} required Whether it must be there.
   */
  constructor(name, schema, before, required) {
    Object.assign(this, {name, before, required});
    const value = before === undefined ? schema.default : JSON.parse(before);
    this.kind = type(schema) || (before === undefined ? '' : typeOf(value));
    this.choices = schema.enum;
    if (this.kind === 'object' || this.kind === 'array') this.kind = '';
    this.input = this.#make(schema, value);
    this.initial = this.json;
    this.old = el('div', {className: 'note was', hidden: true}, 'was: ', before === undefined ? 'not given' : said(before));
    const note = schema.description && el('span', {className: 'note'}, said(schema.description));
    const label = el('span', {className: 'name'}, said(words(schema.title ?? name)), required ? '' : el('span', {className: 'note'}, ' (optional)'),
      this.kind ? '' : el('span', {className: 'note'}, ' as JSON'));
    this.element = el('label', {className: 'field'}, label, note, this.input, this.old);
    this.input.addEventListener('input', () => this.mark());
  }

  #make(schema, value) {
    if (this.choices) return el('select', {}, this.choices.map((each) => el('option', {value: JSON.stringify(each), selected: JSON.stringify(each) === JSON.stringify(value)}, String(each))));
    if (this.kind === 'boolean') return el('input', {type: 'checkbox', checked: value === true});
    if (this.kind === 'integer' || this.kind === 'number')
      return el('input', {type: 'text', inputMode: this.kind === 'integer' ? 'numeric' : 'decimal', value: this.before ?? (value ?? ''), autocomplete: 'off'});
    if (this.kind === 'string' && INPUTS[schema.format] && this.before === undefined) return el('input', {type: INPUTS[schema.format], value: value ?? ''});
    if (this.kind === 'string') return el('textarea', {rows: Math.min(8, String(value ?? '').split('\n').length), value: value ?? '', maxLength: schema.maxLength});
    return el('textarea', {rows: 3, value: this.before ?? (value === undefined ? '' : JSON.stringify(value, null, 1)), spellcheck: false});
  }

  /** Its value as JSON; undefined for one that is left out. */
  get json() {
    const {input} = this;
    if (this.choices) return input.value;
    if (this.kind === 'boolean') return String(input.checked);
    if (this.kind === 'string') return input.value === '' && this.before === undefined ? undefined : JSON.stringify(input.value);
    return input.value.trim() || undefined;
  }

  /** Whether somebody changed it. A browser writes some texts otherwise than they are, and that is no change. */
  get changed() { return this.json !== this.initial; }

  /** What is wrong with it; an empty text if nothing is. */
  get problem() {
    const now = this.json;
    if (now === undefined) return this.required ? 'is needed' : '';
    try {
      const value = JSON.parse(now);
      if (this.kind === 'integer' && !Number.isInteger(value)) return 'must be a whole number';
      if (this.kind === 'number' && typeof value !== 'number') return 'must be a number';
      return '';
    } catch {
      return this.kind ? 'must be a number' : 'must be JSON';
    }
  }

  mark() {
    this.element.classList.toggle('changed', this.changed);
    this.old.hidden = !this.changed;
    this.input.setCustomValidity(this.problem && `${this.name} ${this.problem}`);
  }
}

/**
 * The fields of a form, and what they say.
 *
 * @param {object} schema The schema of the object, as far as it is known.
 * @param {Object<string, string>} before The values, each as JSON.
 */
export function fieldsOf(schema, before) {
  const known = schema.properties ?? {}, required = new Set(schema.required ?? []);
  const names = [...new Set([...Object.keys(known), ...Object.keys(before)])];
  const fields = names.map((name) => new Field(name, resolve(known[name], schema), before[name], required.has(name)));
  return {
    elements: fields.map((field) => field.element),
    /** What was changed, or all that is filled in, each as JSON. */
    values: (all) => Object.fromEntries(fields.filter((field) => field.json !== undefined && (all || field.changed)).map((field) => [field.name, field.json])),
    /** The first problem, shown at its field. */
    check() {
      for (const field of fields) field.mark();
      return fields.map((field) => field.input).find((input) => !input.reportValidity()) === undefined;
    },
    focus: () => fields[0]?.input.focus(),
  };
}
