// Uses a server through the official JavaScript SDK: node round.mjs NAME of a story below.
// The connection string is in the variable SERVICE_BUS. A story that fails ends with exit code 1.
import assert from "node:assert/strict";
import { ServiceBusAdministrationClient, ServiceBusClient } from "@azure/service-bus";

const connection = process.env.SERVICE_BUS;
const prefix = process.env.PREFIX;
const retryOptions = { maxRetries: 0 };

async function withClient(use) {
  const client = new ServiceBusClient(connection, { retryOptions });
  try {
    await use(client);
  } finally {
    await client.close();
  }
}

async function take(receiver, count, seconds = 10) {
  const found = [];
  const deadline = Date.now() + seconds * 1000;
  while (found.length < count && Date.now() < deadline) {
    found.push(...(await receiver.receiveMessages(count - found.length, { maxWaitTimeInMs: 2000 })));
  }
  assert.equal(found.length, count);
  return found;
}

const bodies = (messages) => messages.map((message) => message.body);

const stories = {
  async messages() {
    await withClient(async (client) => {
      const sender = client.createSender(`${prefix}-queue`);
      const receiver = client.createReceiver(`${prefix}-queue`);
      await sender.sendMessages({ body: "single", messageId: "m1", subject: "s" });
      await sender.sendMessages([{ body: { a: 1 } }, { body: [1, 2] }]);
      const batch = await sender.createMessageBatch();
      assert.ok(batch.tryAddMessage({ body: "batched", applicationProperties: { n: 7 } }));
      await sender.sendMessages(batch);
      const found = await take(receiver, 4);
      assert.deepEqual(bodies(found), ["single", { a: 1 }, [1, 2], "batched"]);
      assert.equal(found[0].messageId, "m1");
      assert.equal(found[3].applicationProperties.n, 7);
      await receiver.renewMessageLock(found[0]);
      await receiver.completeMessage(found[0]);
      await receiver.abandonMessage(found[1]);
      await receiver.deferMessage(found[2]);
      await receiver.deadLetterMessage(found[3], { deadLetterReason: "bad" });
      const [again] = await take(receiver, 1);
      assert.equal(again.deliveryCount, 1);
      await receiver.completeMessage(again);
      const [deferred] = await receiver.receiveDeferredMessages([found[2].sequenceNumber]);
      assert.deepEqual(deferred.body, [1, 2]);
      await receiver.completeMessage(deferred);
      const dead = client.createReceiver(`${prefix}-queue`, { subQueueType: "deadLetter" });
      const [letter] = await take(dead, 1);
      assert.equal(letter.deadLetterReason, "bad");
      await dead.completeMessage(letter);
      const later = new Date(Date.now() + 600_000);
      const numbers = await sender.scheduleMessages([{ body: "later" }], later);
      assert.equal((await receiver.peekMessages(1))[0].state, "scheduled");
      await sender.cancelScheduledMessages(numbers);
      assert.equal((await receiver.peekMessages(1)).length, 0);
      const deleting = client.createReceiver(`${prefix}-queue`, { receiveMode: "receiveAndDelete" });
      await sender.sendMessages({ body: "gone" });
      assert.deepEqual(bodies(await take(deleting, 1)), ["gone"]);
    });
  },

  async sessions() {
    await withClient(async (client) => {
      const sender = client.createSender(`${prefix}-sessions`);
      for (const sessionId of ["a", "b"]) {
        await sender.sendMessages([{ body: 1, sessionId }, { body: 2, sessionId }]);
      }
      const named = await client.acceptSession(`${prefix}-sessions`, "b");
      assert.deepEqual(bodies(await take(named, 2)), [1, 2]);
      await named.setSessionState(Buffer.from("half"));
      assert.equal((await named.getSessionState()).toString(), "half");
      await named.renewSessionLock();
      await assert.rejects(client.acceptSession(`${prefix}-sessions`, "b"), {
        code: "SessionCannotBeLocked",
      });
      const next = await client.acceptNextSession(`${prefix}-sessions`);
      assert.equal(next.sessionId, "a");
      for (const message of await take(next, 2)) await next.completeMessage(message);
      await next.close();
      await named.close();
    });
  },

  async subscribing() {
    await withClient(async (client) => {
      const receiver = client.createReceiver(`${prefix}-topic`, "all");
      const seen = [];
      const done = new Promise((resolve, reject) => {
        receiver.subscribe(
          {
            async processMessage(message) {
              seen.push(message.body);
              if (seen.length === 20) resolve();
            },
            async processError(args) {
              reject(args.error);
            },
          },
          { maxConcurrentCalls: 4 },
        );
      });
      const sender = client.createSender(`${prefix}-topic`);
      await sender.sendMessages(Array.from({ length: 20 }, (_, body) => ({ body })));
      await done;
      await receiver.close();
      assert.deepEqual(seen.sort((a, b) => a - b), Array.from({ length: 20 }, (_, at) => at));
    });
  },

  async rules() {
    await withClient(async (client) => {
      const rules = client.createRuleManager(`${prefix}-topic`, "ruled");
      await rules.deleteRule("$Default");
      await rules.createRule("red", { sqlExpression: "colour = 'red'" });
      await rules.createRule("label", { subject: "urgent", applicationProperties: { n: 1 } });
      const names = [];
      for await (const rule of rules.listRules()) names.push(rule.name);
      assert.deepEqual(names.sort(), ["label", "red"]);
    });
  },

  async errors() {
    await withClient(async (client) => {
      await assert.rejects(client.createSender("nothing").sendMessages({ body: 1 }), {
        code: "MessagingEntityNotFound",
      });
      const receiver = client.createReceiver("nothing");
      await assert.rejects(receiver.receiveMessages(1, { maxWaitTimeInMs: 1000 }), {
        code: "MessagingEntityNotFound",
      });
    });
  },

  async administration() {
    const admin = new ServiceBusAdministrationClient(connection);
    const name = `${prefix}-made`;
    const made = await admin.createQueue(name, {
      lockDuration: "PT30S",
      maxDeliveryCount: 7,
      requiresSession: true,
      userMetadata: "a <b>",
      authorizationRules: [
        {
          claimType: "SharedAccessKey",
          accessRights: ["Send"],
          keyName: "writer",
          primaryKey: "p".repeat(32),
          secondaryKey: "s".repeat(32),
        },
      ],
    });
    assert.equal(made.lockDuration, "PT30S");
    assert.equal(made.authorizationRules[0].keyName, "writer");
    assert.ok(await admin.queueExists(name));
    await admin.updateQueue({ ...made, maxDeliveryCount: 3 });
    const found = await admin.getQueue(name);
    assert.equal(found.maxDeliveryCount, 3);
    assert.equal(found.userMetadata, "a <b>");
    assert.equal((await admin.getQueueRuntimeProperties(name)).totalMessageCount, 0);
    await assert.rejects(admin.createQueue(name), { code: "MessageEntityAlreadyExistsError" });
    await assert.rejects(admin.getQueue("nothing"), { code: "MessageEntityNotFoundError" });
    assert.equal(await admin.queueExists("nothing"), false);
    const topic = `${prefix}-made-topic`;
    await admin.createTopic(topic);
    for (const one of ["a", "b", "c", "d", "e"]) {
      await admin.createSubscription(topic, one, {
        defaultRuleOptions: { name: "first", filter: { subject: "x" } },
      });
    }
    const names = [];
    for await (const page of admin.listSubscriptions(topic).byPage({ maxPageSize: 2 })) {
      names.push(page.map((one) => one.subscriptionName));
    }
    assert.deepEqual(names, [["a", "b"], ["c", "d"], ["e"]]);
    assert.equal((await admin.getTopicRuntimeProperties(topic)).subscriptionCount, 5);
    const [first] = await all(admin.listRules(topic, "a"));
    assert.deepEqual([first.name, first.filter.subject], ["first", "x"]);
    const moment = new Date("2026-05-04T03:02:01Z");
    const sqlParameters = { "@a": "red", "@b": 3, "@c": true, "@d": moment };
    await admin.createRule(topic, "a", "sql", { sqlExpression: "c = @a", sqlParameters });
    const rule = await admin.getRule(topic, "a", "sql");
    assert.equal(rule.filter.sqlExpression, "c = @a");
    assert.deepEqual(rule.filter.sqlParameters, sqlParameters);
    const applicationProperties = { text: "x", number: 2.5 };
    await admin.updateRule(topic, "a", { ...rule, filter: { applicationProperties } });
    const changed = await admin.getRule(topic, "a", "sql");
    assert.deepEqual(changed.filter.applicationProperties, applicationProperties);
    await admin.deleteRule(topic, "a", "sql");
    assert.equal((await admin.getNamespaceProperties()).messagingSku, "Standard");
    await admin.deleteTopic(topic);
    await admin.deleteQueue(name);
    assert.equal(await admin.topicExists(topic), false);
  },
};

async function all(items) {
  const found = [];
  for await (const item of items) found.push(item);
  return found;
}

const failure = await stories[process.argv[2]]().then(() => null, (error) => error);
if (failure) console.error(failure);
process.exit(failure ? 1 : 0);
