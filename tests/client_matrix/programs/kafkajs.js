const fs = require('node:fs')
const { CompressionTypes, Kafka, logLevel } = require('kafkajs')

const RECORDS = 3
const given = JSON.parse(process.argv[2])

function login() {
  if (!given.mechanism) return {}
  const mechanism = given.mechanism.toLowerCase()
  const oauthBearerProvider = async () => ({ value: given.token })
  const sasl = mechanism === 'oauthbearer' ? { mechanism, oauthBearerProvider } : { mechanism, username: given.user, password: given.password }
  return { ssl: { ca: [fs.readFileSync(given.ca_file)] }, sasl }
}

const say = (name, value) => console.log(`${name}\t${value}`)

async function main() {
  const kafka = new Kafka({ brokers: [given.bootstrap], logLevel: logLevel.ERROR, ...login() })
  const { topic } = given
  const codecs = { none: CompressionTypes.None, gzip: CompressionTypes.GZIP }
  const record = (value, headers = {}) => ({ key: 'k', value, headers })
  const send = async (producer, message, compression) => {
    const [sent] = await producer.send({ topic, compression, messages: [message] })
    return sent.baseOffset
  }

  const producer = kafka.producer()
  await producer.connect()
  for (const codec of given.codecs) {
    const offsets = []
    for (let i = 0; i < RECORDS; i++) offsets.push(await send(producer, record(codec, { h: 'v' }), codecs[codec]))
    say(codec, offsets)
  }

  const transactional = kafka.producer({ transactionalId: given.transaction, idempotent: true, maxInFlightRequests: 1 })
  await transactional.connect()
  for (const value of ['committed', 'aborted']) {
    const transaction = await transactional.transaction()
    say(value, await send(transaction, record(value)))
    await (value === 'committed' ? transaction.commit() : transaction.abort())
  }
  await transactional.disconnect()

  if (given.refused) {
    try {
      say('refused', await send(producer, record('x', { 'fencepost-expected-offset': '0' })))
    } catch (error) {
      say('refused', `${error.type} ${error.message}`)
    }
    await send(producer, record('x'))
    say('after', 'appended')
  }
  await producer.disconnect()

  const consumer = kafka.consumer({ groupId: given.group, maxWaitTimeInMs: 100 })
  await consumer.connect()
  await consumer.subscribe({ topic, fromBeginning: true })
  const read = []
  await new Promise((done, failed) => {
    consumer.on(consumer.events.CRASH, (event) => failed(event.payload.error))
    consumer.run({
      eachMessage: async ({ message }) => {
        if (!read.includes('committed')) read.push(message.value.toString())
        if (read.includes('committed')) done()
      },
    })
  })
  await consumer.disconnect()
  say('group', read)
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
