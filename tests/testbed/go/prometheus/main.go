// blocks FOLDER [HOURS] writes series into TSDB blocks of HOURS each (18, which a server with the default retention makes);
// blocks URL sends them by Prometheus remote write.
//
// Standard input has one series a line, as JSON: {"labels": {...}, "start": seconds, "step": seconds, "runs": [...]}. A
// run is [value, samples] or [value, samples, rise a sample]. A value is a number, "stale" for a staleness marker, null for
// no sample, or a list of these, which is repeated. Lines with the same labels are one series.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/golang/snappy"
	"github.com/oklog/ulid/v2"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/prompb"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/tsdb/index"
)

const (
	chunkSamples   = 120 // as the head of Prometheus cuts its chunks
	requestSamples = 100_000
)

type run struct {
	values  []float64 // repeated; -Inf: no sample
	samples int64
	rise    float64
}

type part struct {
	start, step int64 // milliseconds
	runs        []run
}

func (p part) end() int64 {
	end := p.start
	for _, r := range p.runs {
		end += r.samples * p.step
	}
	return end
}

type series struct {
	labels labels.Labels
	parts  []part
}

func main() {
	log.SetFlags(0)
	hours := int64(18)
	if len(os.Args) > 2 {
		hours = int64(must(strconv.Atoi(os.Args[2])))
	}
	all := read()
	if strings.HasPrefix(os.Args[1], "http") {
		send(os.Args[1], all)
		return
	}
	first, last := int64(math.MaxInt64), int64(0)
	for _, each := range all {
		first, last = min(first, each.parts[0].start), max(last, each.parts[len(each.parts)-1].end())
	}
	var group sync.WaitGroup
	slots := make(chan struct{}, 2)
	width := hours * 3600_000
	for start := first - first%width; start < last; start += width {
		slots <- struct{}{}
		group.Go(func() {
			write(os.Args[1], all, start, start+width)
			<-slots
		})
	}
	group.Wait()
}

func read() []series {
	byLabels := map[string]*series{}
	decoder := json.NewDecoder(bufio.NewReaderSize(os.Stdin, 1<<20))
	for decoder.More() {
		var line struct {
			Labels      map[string]string
			Start, Step float64
			Runs        [][]json.RawMessage
		}
		check(decoder.Decode(&line))
		each := part{start: int64(math.Round(line.Start * 1000)), step: int64(math.Round(line.Step * 1000))}
		for _, fields := range line.Runs {
			var r run
			check(json.Unmarshal(fields[1], &r.samples))
			if len(fields) > 2 {
				check(json.Unmarshal(fields[2], &r.rise))
			}
			r.values = numbers(fields[0])
			each.runs = append(each.runs, r)
		}
		name := labels.FromMap(line.Labels)
		if byLabels[name.String()] == nil {
			byLabels[name.String()] = &series{labels: name}
		}
		byLabels[name.String()].parts = append(byLabels[name.String()].parts, each)
	}
	var all []series
	for name, each := range byLabels {
		slices.SortFunc(each.parts, func(a, b part) int { return cmp.Compare(a.start, b.start) })
		for i := 1; i < len(each.parts); i++ {
			if each.parts[i].start < each.parts[i-1].end() {
				log.Fatalf("%s: two lines with samples of the same time", name)
			}
		}
		all = append(all, *each)
	}
	slices.SortFunc(all, func(a, b series) int { return labels.Compare(a.labels, b.labels) })
	return all
}

func numbers(text json.RawMessage) []float64 {
	list := []json.RawMessage{text}
	if text[0] == '[' {
		check(json.Unmarshal(text, &list))
	}
	var values []float64
	for _, each := range list {
		switch string(each) {
		case `"stale"`:
			values = append(values, math.Float64frombits(value.StaleNaN))
		case "null":
			values = append(values, math.Inf(-1)) // no sample
		default:
			var number float64
			check(json.Unmarshal(each, &number))
			values = append(values, number)
		}
	}
	return values
}

// encode returns the chunks with the samples from start to before end.
func (s series) encode(start, end int64, stats *tsdb.BlockStats) []chunks.Meta {
	var metas []chunks.Meta
	var chunk *chunkenc.XORChunk
	var appender chunkenc.Appender
	for _, p := range s.parts {
		at := p.start
		for _, r := range p.runs {
			from := min(max(0, (start-at+p.step-1)/p.step), r.samples)
			to := min(max(0, (end-at+p.step-1)/p.step), r.samples)
			for i := from; i < to; i++ {
				number := r.values[i%int64(len(r.values))]
				if math.IsInf(number, -1) {
					if len(r.values) == 1 {
						break
					}
					continue
				}
				t := at + i*p.step
				if chunk == nil || chunk.NumSamples() == chunkSamples {
					chunk = chunkenc.NewXORChunk()
					appender = must(chunk.Appender())
					metas = append(metas, chunks.Meta{Chunk: chunk, MinTime: t})
				}
				if r.rise != 0 {
					number += r.rise * float64(i)
				}
				appender.Append(0, t, number)
				metas[len(metas)-1].MaxTime = t
				stats.NumSamples++
			}
			at += r.samples * p.step
		}
	}
	stats.NumChunks += uint64(len(metas))
	return metas
}

// write makes the block of the samples from start to before end, unless there are none.
func write(folder string, all []series, start, end int64) {
	id := ulid.MustNew(uint64(end), rand.Reader)
	temporary := filepath.Join(folder, id.String()+".tmp-for-creation")
	check(os.MkdirAll(temporary, 0o755))
	chunkFiles := must(chunks.NewWriter(filepath.Join(temporary, "chunks")))
	entries := must(index.NewWriter(context.Background(), filepath.Join(temporary, "index")))
	symbols := map[string]struct{}{}
	for _, each := range all {
		each.labels.Range(func(l labels.Label) { symbols[l.Name], symbols[l.Value] = struct{}{}, struct{}{} })
	}
	sorted := make([]string, 0, len(symbols))
	for symbol := range symbols {
		sorted = append(sorted, symbol)
	}
	slices.Sort(sorted)
	for _, symbol := range sorted {
		check(entries.AddSymbol(symbol))
	}
	meta := tsdb.BlockMeta{ULID: id, MinTime: start, MaxTime: end, Version: 1}
	meta.Compaction.Level, meta.Compaction.Sources = 3, []ulid.ULID{id}
	for _, each := range all {
		metas := each.encode(start, end, &meta.Stats)
		if len(metas) == 0 {
			continue
		}
		check(chunkFiles.WriteChunks(metas...))
		check(entries.AddSeries(storage.SeriesRef(meta.Stats.NumSeries), each.labels, metas...))
		meta.Stats.NumSeries++
	}
	check(chunkFiles.Close())
	check(entries.Close())
	if meta.Stats.NumSeries == 0 {
		check(os.RemoveAll(temporary))
		return
	}
	check(os.WriteFile(filepath.Join(temporary, "meta.json"), must(json.Marshal(meta)), 0o644))
	check(os.Rename(temporary, filepath.Join(folder, id.String())))
	fmt.Printf("%s: %d series, %d samples\n", id, meta.Stats.NumSeries, meta.Stats.NumSamples)
}

// send posts every series, several in a request.
func send(url string, all []series) {
	var request prompb.WriteRequest
	waiting := 0
	for i, each := range all {
		one := prompb.TimeSeries{Labels: prompb.FromLabels(each.labels, nil)}
		for _, meta := range each.encode(0, math.MaxInt64/2, &tsdb.BlockStats{}) {
			samples := meta.Chunk.Iterator(nil)
			for samples.Next() == chunkenc.ValFloat {
				t, number := samples.At()
				one.Samples = append(one.Samples, prompb.Sample{Timestamp: t, Value: number})
			}
		}
		request.Timeseries = append(request.Timeseries, one)
		waiting += len(one.Samples)
		if waiting < requestSamples && i < len(all)-1 {
			continue
		}
		body := snappy.Encode(nil, must(request.Marshal()))
		answer := must(http.Post(url, "application/x-protobuf", bytes.NewReader(body)))
		check(answer.Body.Close())
		if answer.StatusCode >= 300 {
			log.Fatalf("%s: %s", url, answer.Status)
		}
		request.Timeseries, waiting = nil, 0
	}
}

func must[T any](result T, err error) T {
	check(err)
	return result
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
