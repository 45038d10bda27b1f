// Appends one record at the end of partition 0. Arguments: proxy, topic, value.
//
//     npm install kafkajs && node append.js 127.0.0.1:19092 orders one
const { randomUUID } = require('node:crypto')
const { ConfigResourceTypes, Kafka, logLevel } = require('kafkajs')

const [proxy, topic, value] = process.argv.slice(2)
const writeId = randomUUID()
const kafka = new Kafka({ brokers: [proxy], logLevel: logLevel.NOTHING })

async function main() {
  const binding = await bindingOf()
  const producer = kafka.producer()
  await producer.connect()
  let expected = 0 // nothing is read yet
  for (;;) {
    const headers = { 'fencepost-expected-offset': `${expected}${binding}`, 'fencepost-write-id': writeId }
    try {
      const [sent] = await producer.send({ topic, messages: [{ partition: 0, value, headers }] })
      console.log('appended at', sent.baseOffset)
      break
    } catch (error) {
      if (error.type !== 'POLICY_VIOLATION') throw error // the outcome is unknown, or a retry does not help
      console.log('refused: expected', expected)
    }
    // Read what others have appended, then decide again. This also shows whether an earlier attempt succeeded.
    const { records, end } = await readToEnd(expected)
    const own = records.find(({ headers }) => `${headers['fencepost-write-id']}` === writeId)
    if (own) {
      console.log('appended at', own.offset)
      break
    }
    expected = end
  }
  await producer.disconnect()
}

// Other tools copy headers with records: an expected offset with this suffix counts only where it was made for.
async function bindingOf() {
  const admin = kafka.admin()
  await admin.connect()
  const described = [{ type: ConfigResourceTypes.TOPIC, name: topic }]
  const { resources } = await admin.describeConfigs({ includeSynonyms: false, resources: described })
  const { clusterId } = await admin.describeCluster()
  await admin.disconnect()
  const check = resources[0].configEntries.find(({ configName }) => configName === 'fencepost.check.expected.offsets')
  if (!check || check.configValue === 'false') throw new Error(`${topic} does not check expected offsets: they would be ignored`)
  return `@${topic}/0@${clusterId}`
}

async function readToEnd(from) {
  const admin = kafka.admin()
  await admin.connect()
  const end = (await admin.fetchTopicOffsets(topic)).find(({ partition }) => partition === 0).high
  await admin.disconnect()
  const consumer = kafka.consumer({ groupId: `append-${writeId}`, maxWaitTimeInMs: 100 })
  await consumer.connect()
  await consumer.subscribe({ topic, fromBeginning: true })
  const records = []
  let next = from
  await new Promise((done, failed) => {
    consumer.on(consumer.events.CRASH, ({ payload }) => failed(payload.error))
    // Also of a transaction marker, which is no message.
    consumer.on(consumer.events.END_BATCH_PROCESS, ({ payload: { partition, lastOffset } }) => {
      if (partition === 0) next = Math.max(next, Number(lastOffset) + 1)
      if (next >= end) done()
    })
    if (next >= end) done()
    consumer.run({
      autoCommit: false,
      eachMessage: async ({ partition, message }) => {
        if (partition !== 0 || Number(message.offset) < next) return
        records.push(message)
        next = Number(message.offset) + 1
      },
    })
    consumer.seek({ topic, partition: 0, offset: `${from}` })
  })
  await consumer.disconnect()
  return { records, end: next }
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
