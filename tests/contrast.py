"""Whether text can be read, in a real browser."""

from __future__ import annotations

from typing import Any

CONTRAST = """selector => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = colour.map(v => v / 255)
      .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(at).backgroundColor);
      layers.push([r, g, b, a]);
      if (a === 1) break;
    }
    return layers.reverse().reduce((under, [r, g, b, a]) =>
      [r, g, b].map((v, i) => v * a + under[i] * (1 - a)), [255, 255, 255]);
  };
  const found = [];
  for (const element of document.querySelectorAll(selector)) {
    const text = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!text || !element.checkVisibility() || element.closest(".q-icon, i")) continue;
    const paper = behind(element), [r, g, b, a = 1] = numbers(getComputedStyle(element).color);
    const ink = [r, g, b].map((v, i) => v * a + paper[i] * (1 - a));
    const [high, low] = [light(ink), light(paper)].sort((x, y) => y - x);
    const contrast = (high + .05) / (low + .05);
    if (contrast < 4.5) found.push([element.innerText.slice(0, 40), contrast]);
  }
  return found;
}"""


def faint(page: Any, selector: str) -> list[list[Any]]:
    """Text whose contrast with what is behind it is below WCAG's 4.5, with the contrast.

    Args:
        page: Of playwright.
        selector: The elements that are looked at.
    """
    found: list[list[Any]] = page.evaluate(CONTRAST, selector)
    return found
