// The views in the order of the rail. A view: {id, label, letter, watch (names, or a function of app), draw(app), text(app), count?(app), keys?, serverFilter?(app)}.

import { batches } from "./batches.js";
import { config } from "./config.js";
import { errors } from "./errors.js";
import { fleet } from "./fleet.js";
import { keys } from "./keys.js";
import { models } from "./models.js";
import { playground } from "./playground.js";
import { prefixes } from "./prefixes.js";
import { recent } from "./recent.js";
import { routing } from "./routing.js";
import { streams } from "./streams.js";
import { workers } from "./workers.js";

export const VIEWS = [
  fleet,
  models,
  workers,
  streams,
  recent,
  routing,
  prefixes,
  errors,
  batches,
  keys,
  playground,
  config,
];

export function viewOf(id) {
  return VIEWS.find((view) => view.id === id);
}
