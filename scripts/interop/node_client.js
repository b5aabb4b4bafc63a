// Asks every rpc with @grpc/grpc-js, over TLS with a token; run.py says what, and compares.
//
// node node_client.js ADDRESS CA.pem TOKEN PROTOS QUESTIONS.json ANSWERS.json
'use strict';

const fs = require('fs');
const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [address, authority, token, protos, questions, answers] = process.argv.slice(2);
const options = { keepCase: true, longs: String, enums: String, bytes: String, includeDirs: [protos] };
const credentials = grpc.credentials.createSsl(fs.readFileSync(authority));

// Health and reflection are in no file of ours: what is sent and received is written out here.
const health = {
  Check: {
    path: '/grpc.health.v1.Health/Check',
    requestStream: false,
    responseStream: false,
    requestSerialize: () => Buffer.alloc(0),
    requestDeserialize: (bytes) => bytes,
    responseSerialize: (bytes) => bytes,
    responseDeserialize: (bytes) => ({ status: bytes.equals(Buffer.from([8, 1])) ? 'SERVING' : 'not serving' }),
  },
};

function metadata(word) {
  const found = new grpc.Metadata();
  found.set('authorization', `Bearer ${word}`);
  return found;
}

function unary(client, method, request, word) {
  return new Promise((resolve) => {
    client[method](request, metadata(word), { deadline: Date.now() + 60000 }, (error, response) => {
      resolve(error ? { code: error.code } : { response });
    });
  });
}

function stream(client, method, request, word) {
  return new Promise((resolve) => {
    const parts = [];
    const call = client[method](request, metadata(word), { deadline: Date.now() + 60000 });
    call.on('data', (part) => parts.push(part));
    call.on('error', (error) => resolve({ code: error.code }));
    call.on('end', () => resolve({ response: parts }));
  });
}

async function main() {
  const definition = loader.loadSync(path.join(protos, 'dualform/v1/attribution.proto'), options);
  const { AttributionService } = grpc.loadPackageDefinition(definition).dualform.v1;
  const service = new AttributionService(address, credentials);
  const Health = grpc.makeGenericClientConstructor(health, 'Health');
  const checks = new Health(address, credentials);
  const found = [];
  for (const { method, request, wrong_token: wrong } of JSON.parse(fs.readFileSync(questions))) {
    const word = wrong ? 'wrong' : token;
    const client = method === 'Check' ? checks : service;
    const ask = AttributionService.service[method]?.responseStream ? stream : unary;
    found.push(await ask(client, method, request, word));
  }
  fs.writeFileSync(answers, JSON.stringify(found));
  service.close();
  checks.close();
}

main();
