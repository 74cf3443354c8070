// node look.mjs PAGE.html CHROMIUM: opens the page in light and dark, wide and as a phone's, and prints one JSON line for
// each: what it asked the network for, errors, how far it runs over the window's width, and what axe finds.
import fs from 'node:fs';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { chromium } from 'playwright-core';

const [file, executablePath] = process.argv.slice(2);
const axe = fs.readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const browser = await chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-gpu', '--no-first-run'] });
for (const [name, colorScheme, width] of [
  ['light', 'light', 1280],
  ['dark', 'dark', 1280],
  ['phone', 'light', 375],
  ['phone-dark', 'dark', 375],
]) {
  // bypassCSP: the page forbids all scripts, and axe is one.
  const context = await browser.newContext({ colorScheme, viewport: { width, height: 900 }, bypassCSP: true });
  const page = await context.newPage();
  const requests = [];
  const errors = [];
  page.on('request', (request) => requests.push(request.url()));
  page.on('pageerror', (error) => errors.push(String(error)));
  page.on('console', (message) => errors.push(`${message.type()}: ${message.text()}`));
  await page.goto(pathToFileURL(file).href);
  const overflow = await page.evaluate(
    () => document.documentElement.scrollWidth - document.documentElement.clientWidth,
  );
  await page.screenshot({ path: `${name}.png`, fullPage: true });
  await page.evaluate(() => document.querySelectorAll('details').forEach((one) => (one.open = true)));
  await page.evaluate(axe);
  const found = await page.evaluate(() => window.axe.run(document));
  const violations = found.violations.map((one) => ({ id: one.id, impact: one.impact, html: one.nodes[0].html }));
  console.log(JSON.stringify({ name, requests, errors, overflow, passes: found.passes.length, violations }));
  await context.close();
}
await browser.close();
