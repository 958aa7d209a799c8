// What a careful reader would complain about: called inside the page, answers with a list of sentences.
() => {
  const found = new Set(), width = innerWidth;
  const name = e => `${e.tagName.toLowerCase()}.${e.getAttribute('class') || ''} "${e.textContent.trim().slice(0, 30)}"`;
  const shown = r => r.width > 0.5 && r.height > 0.5;
  const scroller = e => e.closest('.scroll');
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5
                      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1.5;
  const rgb = text => text.match(/[\d.]+/g).map(Number);
  const luminance = c => c.slice(0, 3).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0.99) return c;
    }
    return [255, 255, 255];
  };

  if (document.documentElement.scrollWidth > width) found.add(`sideways: the page is ${document.documentElement.scrollWidth} wide`);

  for (const e of document.body.querySelectorAll('*')) {
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    if (!shown(box) || e.closest('svg') !== null && e.tagName !== 'svg') continue;
    if (!scroller(e) && (box.right > width + 1 || box.left < -1)) found.add(`wide: ${name(e)}`);
    if (scroller(e) !== e && style.overflowX !== 'visible' && style.display !== 'inline' && e.tagName !== 'svg'
        && (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1)) found.add(`clipped: ${name(e)}`);
    const kids = [...e.children].filter(k => getComputedStyle(k).display !== 'inline' && shown(k.getBoundingClientRect()));
    if (e.tagName !== 'svg') kids.forEach((a, i) => kids.slice(i + 1).forEach(b => {
      if (meet(a.getBoundingClientRect(), b.getBoundingClientRect())) found.add(`overlap: ${name(a)} and ${name(b)}`);
    }));
  }

  const texts = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, e = node.parentElement;
    if (!node.data.trim()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const svg = e.closest('svg'), frame = (svg || scroller(e) || document.body).getBoundingClientRect();
    for (const r of range.getClientRects()) {
      if (!shown(r)) continue;
      if (svg && (r.left < frame.left - 1 || r.right > frame.right + 1 || r.top < frame.top - 1 || r.bottom > frame.bottom + 1))
        found.add(`clipped: "${node.data}" in a figure`);
      const seen = {left: Math.max(r.left, frame.left), right: Math.min(r.right, frame.right), top: r.top, bottom: r.bottom};
      // A line box is taller than its letters: only the middle of it counts.
      const lean = (r.bottom - r.top) / 4;
      if (seen.right > seen.left) texts.push({...seen, top: r.top + lean, bottom: r.bottom - lean, node});
      const style = getComputedStyle(e), ink = rgb(svg ? style.fill : style.color), ground = paper(e);
      const [dark, light] = [luminance(ink), luminance(ground)].sort((a, b) => a - b);
      const contrast = (light + 0.05) / (dark + 0.05);
      if (contrast < 4.5) found.add(`contrast: ${contrast.toFixed(2)} of ${name(e)}`);
    }
  }
  texts.sort((a, b) => a.top - b.top);
  texts.forEach((a, i) => {
    for (let j = i + 1; j < texts.length && texts[j].top < a.bottom; j++)
      if (meet(a, texts[j])) found.add(`overlap: "${a.node.data.trim()}" and "${texts[j].node.data.trim()}"`);
  });
  return {found: [...found], num_texts: texts.length, num_figures: document.querySelectorAll('figure svg').length};
}
