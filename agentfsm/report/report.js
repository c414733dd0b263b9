for (const run of document.querySelectorAll('article[data-run]')) {
  const rows = [...run.querySelectorAll('table.ledger tbody tr')], pictures = run.querySelectorAll('figure svg');
  if (!rows.length || !pictures.length) continue;
  const bar = document.createElement('div'), slider = document.createElement('input');
  const said = document.createElement('output'), back = document.createElement('button');
  const on = document.createElement('button');
  bar.className = 'steps'; slider.type = 'range'; slider.min = 0; slider.max = rows.length; slider.value = 0;
  slider.setAttribute('aria-label', 'Step through the moves of the run'); said.setAttribute('aria-live', 'polite');
  back.textContent = 'back'; on.textContent = 'next'; said.textContent = 'step through the moves with the arrow keys';
  bar.append(back, slider, on, said); run.querySelector('figure').before(bar);
  const show = (place) => {
    run.querySelectorAll('.now').forEach((each) => each.classList.remove('now'));
    slider.value = place;
    if (!place) { said.textContent = 'the whole run'; return; }
    const row = rows[place - 1], cells = row.cells, id = cells[3].textContent + '.' + cells[4].textContent;
    row.classList.add('now');
    const box = row.closest('.scroll'); box.scrollTop = row.offsetTop - box.clientHeight / 2;
    for (const each of run.querySelectorAll('svg [data-edge]'))
      if (each.dataset.edge.split(' ').includes(id)) each.classList.add('now');
    said.textContent = 'move ' + place + ' of ' + rows.length + ': ' + id + ' to ' + cells[5].textContent;
    slider.setAttribute('aria-valuetext', said.textContent);
  };
  slider.addEventListener('input', () => show(+slider.value));
  back.addEventListener('click', () => show(Math.max(0, +slider.value - 1)));
  on.addEventListener('click', () => show(Math.min(rows.length, +slider.value + 1)));
}
